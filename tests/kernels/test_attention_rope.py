"""The rotation is the model's, stays exact at the far end of the context, and a row does not depend on its company."""

import math
from types import SimpleNamespace

import pytest
import torch

from onebox.kernels import attention
from onebox.kernels.attention.frequencies import rotary_frequencies
from onebox.model import reference as model
from onebox.spec.model import spec_from_config
from onebox.spec.shapes import SHAPES
from onebox.spec.yarn import Yarn
from tests.conftest import HAS_GPU
from tests.kernels.catalogue import forms
from tests.kernels.company import assert_rows_stand_alone
from tests.kernels.tolerance import assert_same

THETA, SECTION, LAST_POSITION = 1e7, (11, 11, 10), 262_143
STRETCH = Yarn(4.0, 262_144, attention_factor=0.1 * math.log(4) + 1)
STRETCHED_TOKENS = 1_010_000
SMALL, FULL = (2, 1, 32, (2, 3, 5)), (32, 2, 256, (2, 3, 8, 17, 64))


@pytest.mark.parametrize("module", ["reference", "cpu", "kernel"])
def test_the_table_is_exact_at_the_last_position(module, device):
    chosen = forms(module)
    frequencies = rotary_frequencies(THETA, 64)
    positions = torch.tensor([LAST_POSITION, LAST_POSITION - 1, 200_000, 1, 0]).expand(3, 5)
    cos, sin = chosen.rotary_table(positions.to(device), frequencies.to(device), SECTION, 1.0)
    angles = positions[0, :, None].float() * frequencies
    for found, function in ((cos, math.cos), (sin, math.sin)):
        exact = torch.tensor([[function(angle) for angle in row] for row in angles.tolist()], dtype=torch.float64)
        assert torch.equal(found.cpu(), exact.float())


def their_embedding(**rope):
    """Transformers' rotary embedding of the published models, with other rope parameters."""
    from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextRotaryEmbedding

    published = SHAPES["qwen3.5-122b-a10b"]["text_config"]
    config = {**published, "rope_parameters": {**published["rope_parameters"], **rope}}
    return Qwen3_5MoeTextRotaryEmbedding(Qwen3_5MoeTextConfig(**config)), spec_from_config(config)


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262_144},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 262_144},
        {"rope_type": "yarn", "factor": 3, "original_max_position_embeddings": 32_768, "truncate": False},
        {"rope_type": "yarn", "factor": 8.5, "original_max_position_embeddings": 100, "beta_fast": 9, "beta_slow": 2},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 12, "beta_slow": 1.5, "beta_fast": 2},
    ],
)
def test_frequencies_are_the_bits_of_transformers(rope):
    theirs, spec = their_embedding(**rope)
    assert torch.equal(rotary_frequencies(spec.rope_theta, spec.rotary_dim, spec.yarn), theirs.inv_freq)


@pytest.mark.parametrize("module", ["reference", "cpu", "kernel"])
def test_the_stretched_table_is_that_of_transformers_up_to_the_last_position(module, device):
    theirs, spec = their_embedding(rope_type="yarn", factor=4.0, original_max_position_embeddings=262_144)
    ends = [0, 1, 262_143, 262_144, 700_001, STRETCHED_TOKENS - 1]
    positions = torch.tensor([ends, ends[::-1], ends[2:] + ends[:2]])
    frequencies = rotary_frequencies(spec.rope_theta, spec.rotary_dim, spec.yarn)
    found = forms(module).rotary_table(
        positions.to(device), frequencies.to(device), spec.mrope_section, spec.yarn.attention_factor
    )
    expected = theirs(torch.zeros(1), positions[:, None])
    for ours, both_halves in zip(found, expected, strict=True):
        # The angles are the same bits; their cosines, computed in float32, may differ in the last.
        assert (ours.cpu() - both_halves[0, :, :32]).abs().max() <= 2.5e-7


def test_angles_at_the_last_stretched_position_are_as_exact_as_float32_is():
    """A frequency has half a bit of error, and the product another: together at most 0.05 where a turn is 6.28."""
    frequencies = rotary_frequencies(THETA, 64, STRETCH)
    pairs = torch.arange(32, dtype=torch.float64)
    exact = THETA ** (-pairs / 32)
    first, last = STRETCH.mixed_pairs(THETA, 64)
    stretched = ((pairs - first) / (last - first)).clamp(0, 1)
    exact = exact * (1 - stretched) + exact / STRETCH.factor * stretched
    assert (first, last) == (14, 22)
    assert ((frequencies.double() - exact) / exact).abs().max() < 1.8e-7
    for position in (262_143, STRETCHED_TOKENS - 1):
        errors = (torch.tensor(float(position)) * frequencies).double() - position * exact
        assert errors.abs().max() < position * 5e-8
        assert errors[0] == 0, "whole positions are float32 numbers"


@pytest.mark.parametrize("module", ["reference", "cpu", "kernel"])
def test_each_frequency_takes_the_axis_that_the_interleaving_gives_it(module, device):
    chosen = forms(module)
    # 0, 11 and 22 are near 0, 7/2 pi and 7 pi: their cosines 1, 0 and -1 tell the axes apart.
    positions = torch.tensor([[0], [11], [22]], device=device)
    cos, _ = chosen.rotary_table(positions, torch.ones(32, device=device), SECTION, 1.0)
    axes = [{1.0: "t", math.cos(11): "h", math.cos(22): "w"}[value] for value in _nearest(cos[0].tolist())]
    assert "".join(axes) == "thw" * 10 + "th"


def _nearest(values):
    return [min((1.0, math.cos(11), math.cos(22)), key=lambda exact: abs(exact - value)) for value in values]


def test_norm_and_rotation_are_the_models():
    num_heads, num_kv_heads, head_dim, rotary_dim = 3, 2, 32, 16
    draw = torch.Generator().manual_seed(0)
    q_gate = torch.randn(5, num_heads * 2 * head_dim, generator=draw)
    k = torch.randn(5, num_kv_heads * head_dim, generator=draw)
    weights = 0.1 * torch.randn(2, head_dim, generator=draw)
    positions = torch.randint(0, 100, (3, 5), generator=draw)
    spec = SimpleNamespace(rotary_dim=rotary_dim, rope_theta=THETA, mrope_section=(3, 3, 2), yarn=None)

    cos, sin = attention.rotary_table(positions, rotary_frequencies(THETA, rotary_dim), spec.mrope_section, 1.0)
    query, gate, key = attention.qk_norm_rope(q_gate, k, *weights, cos, sin, 1e-6)

    rotation = model.rotary(spec, positions)
    split, expected_gate = q_gate.view(5, num_heads, 2 * head_dim).chunk(2, dim=-1)
    normed = [
        model.zero_centred_norm(split, weights[0], 1e-6),
        model.zero_centred_norm(k.view(5, num_kv_heads, head_dim), weights[1], 1e-6),
    ]
    assert_same((query, key), tuple(model.rotate(heads, rotation) for heads in normed))
    assert torch.equal(gate, expected_gate)


def check_rows_are_independent(module, device, num_heads, num_kv_heads, head_dim, counts, dtype):
    chosen = forms(module)
    draw = torch.Generator().manual_seed(head_dim)
    sizes = [num_heads * 2 * head_dim, num_kv_heads * head_dim]
    fused = torch.randn(max(counts), sum(sizes), generator=draw).to(device, dtype)
    weights = (0.1 * torch.randn(2, head_dim, generator=draw)).to(device)
    positions = torch.randint(0, LAST_POSITION, (3, max(counts)), generator=draw).to(device)
    frequencies = rotary_frequencies(THETA, head_dim // 4).to(device)

    def outputs(rows):
        cos, sin = chosen.rotary_table(positions[:, rows], frequencies, (2, 1, 1), 1.1)
        return cos, sin, *chosen.qk_norm_rope(*fused[rows].split(sizes, dim=-1), *weights, cos, sin, 1e-6)

    assert_rows_stand_alone(outputs, counts)


@pytest.mark.parametrize("module", ["reference", "cpu", "kernel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.skipif(HAS_GPU, reason="the GPU runs the full shapes")
def test_a_row_does_not_depend_on_its_company(module, dtype):
    check_rows_are_independent(module, torch.device("cpu"), *SMALL, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_of_the_twin_does_not_depend_on_its_company_at_full_size(dtype):
    check_rows_are_independent("reference", torch.device("cpu"), *FULL, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_does_not_depend_on_its_company_on_the_gpu(device, dtype):
    check_rows_are_independent("kernel", device, *FULL, dtype)
