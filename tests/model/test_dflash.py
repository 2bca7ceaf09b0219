"""The block drafter on the kernels' twins against the float32 reference, step after step."""

import pytest
import torch

from onebox.kernels.draft.tensors import BlockContext, ContextRows
from onebox.model import dflash_reference as reference
from onebox.model.cpu import cpu_linear
from onebox.model.dflash import build_dflash
from onebox.model.linear import PlainLinear
from onebox.model.memory import DraftMemory, MemoryShape
from onebox.spec.dflash_config import drafter_from_config
from onebox.spec.dflash_memory import ring_tokens
from onebox.spec.kv import PAGE_TOKENS, KVFormat
from tests.drafters import random_drafter_weights, small_drafter_config
from tests.model.configs import CONFIGS

CPU = torch.device("cpu")
TARGET = {"text_config": {**CONFIGS["family pattern"]["text_config"], "hidden_size": 128}}
FULL = ["full_attention"] * 3


class Given:
    """Weights by plain name as a drafter's parts."""

    device = CPU

    def __init__(self, weights, *, is_fused):
        self._weights = weights
        self._is_fused = is_fused

    def linear(self, *names):
        weight = torch.cat([self._weights[f"{name}.weight"] for name in names])
        return PlainLinear(weight.to(torch.bfloat16)) if self._is_fused else cpu_linear(weight, torch.float32)

    def small(self, name):
        return self._weights[f"{name}.weight"]


class Side:
    """One sequence through the runtime: its pages are scattered, its ring is one of three."""

    slot = 1

    def __init__(self, drafter, num_pages=8):
        self.drafter = drafter
        shape = MemoryShape(
            KVFormat.parse("bf16"), num_pages, 3, 0, 16, False, drafter=drafter.spec,
            ring_tokens=ring_tokens(drafter.spec, PAGE_TOKENS),
        )  # fmt: skip
        self.memory = DraftMemory.allocate(drafter.spec, shape, torch.float32, CPU)
        for part in (self.memory.rings, self.memory.pages):
            part.fill_(float("nan"))  # what was never written must not be seen
        self.table = torch.arange(num_pages, dtype=torch.int32).flip(0).unsqueeze(0)

    def extend(self, features, start, *, is_prefill=False):
        """The features of the tokens from `start` on, committed or not."""
        count = len(features)
        places = torch.arange(start, start + count)
        mapping = self.table[0, places // PAGE_TOKENS].to(torch.int64) * PAGE_TOKENS + places % PAGE_TOKENS
        numbers = ([0, count], [self.slot], [start + count])
        rows = ContextRows(*(torch.tensor(part, dtype=torch.int32) for part in numbers), mapping)
        write = self.drafter.prefill_context if is_prefill else self.drafter.decode_context
        write(features, places, rows, self.memory)

    def draft(self, embedded, length):
        numbers = (torch.tensor([value], dtype=torch.int32) for value in (length, self.slot, 0))
        context = BlockContext(*numbers, self.table)
        return self.drafter.draft(embedded, torch.arange(length, length + len(embedded)), context, self.memory)


def made(is_fused=False, **changes):
    spec = drafter_from_config(small_drafter_config(TARGET, **changes))
    weights = {name: tensor.bfloat16().float() for name, tensor in random_drafter_weights(spec).items()}
    drafter = build_dflash(spec, Given(weights, is_fused=is_fused), torch.float32)
    if is_fused:
        object.__setattr__(drafter, "is_fused", True)  # what a GPU's parts would have decided
    return spec, weights, drafter


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"layer_types": FULL, "sliding_window": None, "use_sliding_window": False}, {"is_causal": True},
     {"is_causal": False}],
    ids=["both kinds", "full", "causal", "both ways"],
)  # fmt: skip
def test_blocks_are_the_references_whatever_was_rejected_before(changes, is_fused):
    """Steps of a prefill and of verified blocks, some rows of which are rejected; the ring wraps twice."""
    spec, weights, drafter = made(is_fused, **changes)
    draw = torch.Generator().manual_seed(1)
    side, context, length = Side(drafter), reference.DraftContext.empty(spec), 0
    with torch.inference_mode():
        for step, (count, rejected) in enumerate([(61, 0), (5, 3), (1, 7), (60, 0), (8, 0), (1, 7), (40, 0), (2, 6)]):
            features = torch.randn(count + rejected, spec.feature_size, generator=draw)
            reference.extend(spec, weights, features[:count], context)
            side.extend(features, length, is_prefill=count > 8)
            length += count
            embedded = torch.randn(3 + step % 6, spec.hidden_size, generator=draw)
            expected = reference.draft(spec, weights, embedded, context)[1:]
            found = side.draft(embedded, length)
            assert torch.allclose(found, expected, atol=2e-3, rtol=2e-3), (step, (found - expected).abs().max())
            assert expected.abs().max() > 0.5


def test_a_saved_ring_drafts_as_the_one_that_it_was_copied_from():
    spec, weights, drafter = made()
    draw = torch.Generator().manual_seed(2)
    side, context = Side(drafter), reference.DraftContext.empty(spec)
    features = torch.randn(130, spec.feature_size, generator=draw)
    embedded = torch.randn(4, spec.hidden_size, generator=draw)
    with torch.inference_mode():
        side.extend(features[:100], 0, is_prefill=True)
        side.memory.copy_tokens(side.slot, 2, 70 - side.memory.window, 70)
        side.extend(features[100:], 100, is_prefill=True)
        side.slot = 2
        reference.extend(spec, weights, features[:70], context)
        expected = reference.draft(spec, weights, embedded, context)[1:]
        assert torch.allclose(side.draft(embedded, 70), expected, atol=2e-3, rtol=2e-3)


def test_a_row_without_a_place_in_the_pages_is_not_written():
    _, _, drafter = made()
    side = Side(drafter)
    rows = ContextRows(
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32),
        torch.tensor([5], dtype=torch.int32), torch.tensor([-1]),
    )  # fmt: skip
    with torch.inference_mode():
        features = torch.randn(1, drafter.spec.feature_size)
        drafter.decode_context(features, torch.tensor([4]), rows, side.memory)
    assert side.memory.rings.isnan().all()
    assert side.memory.pages.isnan().all()
