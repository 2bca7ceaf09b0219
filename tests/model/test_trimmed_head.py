"""A head for drafts has the LM head's rows as they are stored, in every format, and can change them in place."""

import pytest
import torch

from onebox.formats import (
    Dialect,
    quantize_fp8_block,
    quantize_fp8_rows,
    quantize_fp8_tensor,
    quantize_nvfp4,
)
from onebox.formats.group_int import quantize
from onebox.model import compiled
from onebox.model.cpu import CpuLinear
from onebox.model.linear import Fp8Linear, Nvfp4Linear, PlainLinear, _int_linear
from onebox.model.trimmed_head import TrimmedHead
from onebox.spec.errors import MismatchError, UnsupportedError

ROWS, WIDTH = 295, 256


def heads():
    weight = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    weight *= torch.linspace(0.2, 3, ROWS)[:, None]  # scales that differ from row to row
    yield "int4", _int_linear(quantize(weight, 4, 128))
    yield "int8", _int_linear(quantize(weight, 8, WIDTH))
    yield "fp8 blocks", Fp8Linear(True, *quantize_fp8_block(weight))
    codes, scale = quantize_fp8_rows(weight)
    yield "fp8 rows", Fp8Linear(False, codes, scale.flatten())
    codes, scale = quantize_fp8_tensor(weight)
    yield "fp8 tensor", Fp8Linear(False, codes, scale.flatten())
    yield "nvfp4", Nvfp4Linear(*quantize_nvfp4(weight, Dialect.MODELOPT))
    yield "bf16", PlainLinear(weight.to(torch.bfloat16))
    yield "cpu", CpuLinear(weight.T.contiguous().T)
    if compiled.is_available():
        from onebox.model.compiled.linear import CompiledLinear

        yield "compiled float32", CompiledLinear.of(weight)
        yield "compiled bfloat16", CompiledLinear.of(weight.to(torch.bfloat16))


HEADS = dict(heads())
UNITS = torch.eye(WIDTH)[::37].contiguous()
"""Rows of one 1 each: their logits are single numbers of the weights, whatever the order of sums."""


def logits(linear):
    from onebox.model.linear import DecodeActivations

    return linear.decode(DecodeActivations(UNITS), torch.float32)


@pytest.mark.parametrize("name", HEADS)
def test_the_logits_of_listed_tokens_are_those_of_the_head(name):
    tokens = torch.tensor([294, 0, 17, 130, 16, 288, 31, 128, 256, 5, 99])
    trimmed = TrimmedHead.of(HEADS[name], tokens)
    whole = logits(HEADS[name])
    assert trimmed.logits(UNITS).shape == (len(UNITS), len(tokens))
    assert torch.equal(trimmed.logits(UNITS), whole[:, tokens])
    assert not torch.equal(whole[:, tokens], whole[:, : len(tokens)])


@pytest.mark.parametrize("name", HEADS)
def test_rows_are_replaced_in_the_same_memory(name):
    tokens = torch.arange(40, 75)
    trimmed = TrimmedHead.of(HEADS[name], tokens)
    memory = {field: value.data_ptr() for field, value in vars(trimmed.rows).items() if torch.is_tensor(value)}
    places, new = torch.tensor([34, 3, 18]), torch.tensor([290, 2, 200])
    trimmed.put(HEADS[name], places, new)
    tokens[places] = new
    assert trimmed.token_ids.tolist() == tokens.tolist()
    assert torch.equal(trimmed.logits(UNITS), logits(HEADS[name])[:, tokens])
    assert memory == {field: value.data_ptr() for field, value in vars(trimmed.rows).items() if torch.is_tensor(value)}


def test_rows_of_another_format_are_refused():
    trimmed = TrimmedHead.of(HEADS["bf16"], torch.arange(3))
    with pytest.raises(MismatchError, match="cannot be copied"):
        trimmed.put(HEADS["int8"], torch.tensor([0]), torch.tensor([1]))
    with pytest.raises(UnsupportedError, match="--draft-vocab full"):
        TrimmedHead.of(object(), torch.arange(3))
