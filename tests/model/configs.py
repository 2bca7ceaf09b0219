"""Small members of the family that differ in everything the math depends on."""

from onebox.model.random import TINY
from onebox.spec.model import FULL, LINEAR
from tests.model.oracle import tiny_config

TOWER_WITH_DEPTH = {
    "depth": 2,
    "hidden_size": 32,
    "in_channels": 3,
    "intermediate_size": 48,
    "model_type": "qwen3_5_moe",
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 128,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def _rope(fraction, sections, theta=10_000_000):
    rope = TINY["text_config"]["rope_parameters"]
    return {**rope, "partial_rotary_factor": fraction, "mrope_section": sections, "rope_theta": theta}


CONFIGS = {
    # heads 4 / 2, ratio 2, 3:1 twice, 8 experts top 2, conv 4, a quarter rotates
    "family pattern": tiny_config({"num_hidden_layers": 8}),
    # ratio 1
    "all linear but the last": tiny_config(
        {"num_hidden_layers": 5, "layer_types": [LINEAR] * 4 + [FULL], "linear_num_key_heads": 4}
    ),
    # heads 8 / 1, ratio 4, conv 2, 16 experts top 4
    "alternating": tiny_config(
        {
            "layer_types": [LINEAR, FULL] * 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "linear_num_value_heads": 8,
            "linear_conv_kernel_dim": 2,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
        }
    ),
    # heads 2 / 2, ratio 1, conv 3, all experts used, another shared size
    "full first": tiny_config(
        {
            "num_hidden_layers": 3,
            "layer_types": [FULL, LINEAR, LINEAR],
            "num_attention_heads": 2,
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 3,
            "num_experts": 3,
            "num_experts_per_tok": 3,
            "shared_expert_intermediate_size": 48,
        }
    ),
    # heads 6 / 3, half of a head rotates, all sections full; values wider than keys
    "half rotates": tiny_config(
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "linear_value_head_dim": 64,
            "rope_parameters": _rope(0.5, [6, 5, 5], 10_000),
        }
    ),
    # the whole head rotates, time has the frequencies that the sections leave; conv 6
    "all rotates": tiny_config(
        {"head_dim": 32, "linear_conv_kernel_dim": 6, "rope_parameters": _rope(1.0, [8, 4, 4], 50)}
    ),
    # a trained length so short that the mix of frequencies falls among the 16 of this head, and prompts go beyond it
    "yarn": tiny_config(
        {
            "layer_types": [LINEAR, FULL] * 2,
            "rope_parameters": {
                **_rope(0.5, [6, 5, 5], 10_000),
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 300,
            },
        }
    ),
    "tied head, one expert": tiny_config({"num_experts": 5, "num_experts_per_tok": 1}, tie_word_embeddings=True),
    "text only": TINY["text_config"],
    # ratio 4, alternating, half rotates slowly; prompts with images and videos: test_vision.py
    "images": tiny_config(
        {
            "layer_types": [LINEAR, FULL] * 2,
            "linear_num_value_heads": 8,
            "rope_parameters": _rope(0.5, [6, 5, 5], 50),
        },
        vision_config=TOWER_WITH_DEPTH,
    ),
}
