"""Runs in vLLM's own environment: its DFlash model on a CPU, float32, over a context of features and one block.

    block_drafter.py TARGET DRAFTER INPUTS OUTPUTS

INPUTS (safetensors): features [T, taps * H] of the context, embedded [B, H] of the block. OUTPUTS: the block's hidden
states [B, H] after the final norm, the keys and values of the context by layer, and each layer's window (-1: none) and
causality, as vLLM resolves them. Loading, fusing, projections, norms, rotations, MLPs and masks are vLLM's. Two things
are not: its paged attention, which wants a running engine, is replaced by a plain softmax with the layer's own window
and causality; and the context's keys are normed layer by layer, because the CPU kernel of 0.32 norms those of all
layers with the first layer's weight (`ops.rms_norm` with a weight of two dimensions).
"""

import sys

import torch
import vllm.config.vllm
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM


class PlainAttention(nn.Module):
    """In place of vLLM's Attention: its cache is two tensors, and `do_kv_cache_update` appends to them."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None, causal: bool) -> None:
        super().__init__()
        self.sizes = num_heads, num_kv_heads, head_dim
        self.window, self.causal, self.kv_cache = window, causal, None
        self.keys = self.values = torch.empty(0, num_kv_heads, head_dim)

    @property
    def impl(self) -> "PlainAttention":
        return self

    def do_kv_cache_update(self, _layer: nn.Module, key: Tensor, value: Tensor, _cache: None, _slots: Tensor) -> None:
        self.keys, self.values = torch.cat([self.keys, key]), torch.cat([self.values, value])

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads, kv_heads, dim = self.sizes
        keys = torch.cat([self.keys, key.view(-1, kv_heads, dim)]).repeat_interleave(heads // kv_heads, dim=1)
        values = torch.cat([self.values, value.view(-1, kv_heads, dim)]).repeat_interleave(heads // kv_heads, dim=1)
        places = torch.arange(len(keys))
        distance = places[len(self.keys) :, None] - places
        visible = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            visible = visible & (distance.abs() < self.window)
        scores = torch.einsum("thd,nhd->htn", query.view(-1, heads, dim), keys) * dim**-0.5
        shares = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return torch.einsum("htn,nhd->thd", shares, values).flatten(1)


def norm_by_layer(model: nn.Module) -> None:
    """Has vLLM's own norm of each layer make the context's keys [L, T, KV heads, D]."""
    norms = [layer.self_attn.k_norm for layer in model.layers]
    model._normalize_context_k = lambda keys: torch.stack([norm(own) for norm, own in zip(norms, keys, strict=True)])


def main() -> None:
    target, drafter, inputs, outputs = sys.argv[1:]
    # Its second model runner alone runs a drafter with both layer kinds, and that one needs Triton on a GPU. Here the
    # model is called directly, and no runner is made.
    VllmConfig.use_v2_model_runner = property(lambda _: True)
    vllm.config.vllm.HAS_TRITON = True
    config = EngineArgs(
        model=target,
        skip_tokenizer_init=True,
        language_model_only=True,
        max_model_len=1024,
        enforce_eager=True,
        dtype="float32",
        speculative_config={"method": "dflash", "model": drafter, "num_speculative_tokens": 15},
    ).create_engine_config()
    given = load_file(inputs)
    with set_current_vllm_config(config), torch.no_grad():
        init_distributed_environment(1, 0, f"file://{outputs}.rendezvous", 0, "gloo")
        initialize_model_parallel(1)
        torch.set_default_dtype(torch.float32)
        model = DFlashQwen3ForCausalLM(vllm_config=config)
        for layer in model.model.layers:
            own = layer.self_attn
            own.attn = PlainAttention(own.num_heads, own.num_kv_heads, own.head_dim, own.sliding_window, own.causal)
        model.load_weights(load_file(f"{drafter}/model.safetensors").items())
        process_weights_after_loading(model, config.speculative_config.draft_model_config, torch.device("cpu"))
        norm_by_layer(model.model)
        length, rows = len(given["features"]), len(given["embedded"])
        context = model.combine_hidden_states(given["features"])
        places = torch.arange(length)
        model.precompute_and_store_context_kv(context, places, places)
        hidden = model(torch.zeros(rows, dtype=torch.int64), torch.arange(length, length + rows), given["embedded"])
        attention = [layer.self_attn.attn for layer in model.model.layers]
        save_file(
            {
                "hidden": hidden.contiguous(),
                "keys": torch.stack([each.keys for each in attention]),
                "values": torch.stack([each.values for each in attention]),
                "windows": torch.tensor([-1 if each.window is None else each.window for each in attention]),
                "causal": torch.tensor([each.causal for each in attention]),
            },
            outputs,
        )
    sys.stdout.write("RESULT done\n")


if __name__ == "__main__":
    main()
