"""Inputs of sampling: all methods of a row, mixed; ties, masked tokens, tiny vocabularies, non-finite logits."""

from functools import partial
from typing import Any, NamedTuple

import torch

from onebox.kernels.common.case import Case, generator

__all__ = ["CASES"]

_VOCABULARY = 248_320


class _Limits(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


_GREEDY, _PLAIN, _COMMON = _Limits(temperature=0.0), _Limits(), _Limits(0.6, top_k=20, top_p=0.95)
_CUT = [_Limits(top_k=70), _Limits(1.3, top_p=0.9), _Limits(min_p=0.05), _Limits(0.8, top_k=80, top_p=0.7, min_p=0.02)]
_EDGES = [_Limits(top_k=1), _Limits(top_p=1e-9), _Limits(min_p=1.0), _Limits(top_k=10**6, top_p=0.5), _Limits(top_k=64)]


def _logits(kind: str, rows: int, vocabulary: int) -> torch.Tensor:
    drawn = 3 * torch.randn(rows, vocabulary, generator=generator(rows * vocabulary))
    if kind == "ties":
        return drawn.round()
    if kind == "equal":
        return torch.zeros(rows, vocabulary).copysign(drawn)  # zeros of both signs, which are equal
    if kind == "refused":
        return drawn.masked_fill(torch.arange(vocabulary) % 7 != 3, float("-inf"))
    if kind == "broken":  # in turn a NaN, an infinity, only -inf, and intact rows
        drawn[0::4, vocabulary // 3] = float("nan")
        drawn[1::4, vocabulary // 2] = float("inf")
        drawn[2::4] = float("-inf")
    return drawn


def _sample(device: torch.device, kind: str, vocabulary: int, limits: list[_Limits]) -> dict[str, Any]:
    columns = zip(*limits, strict=True) if limits else [(), (), (), ()]
    dtypes = torch.float64, torch.int32, torch.float64, torch.float64
    rows = len(limits)
    arguments = {
        name: torch.tensor(column, dtype=dtype)
        for name, column, dtype in zip(_Limits._fields, columns, dtypes, strict=True)
    }
    arguments["logits"] = _logits(kind, rows, vocabulary)
    arguments["seeds"] = torch.randint(-(2**62), 2**62, (rows,), generator=generator(rows))
    arguments["positions"] = 262_143 - torch.arange(rows)
    return {name: tensor.to(device) for name, tensor in arguments.items()}


def _penalties(device: torch.device, rows: int, vocabulary: int, length: int) -> dict[str, Any]:
    random = generator(rows * vocabulary)
    token_ids = torch.rand(rows, vocabulary, generator=random).argsort(-1)[:, :length].to(torch.int32)
    token_ids[1:, length // 2 :] = -1  # a row with fewer tokens than the longest
    arguments = {
        "logits": 3 * torch.randn(rows, vocabulary, generator=random),
        "token_ids": token_ids,
        "counts": torch.randint(0, 4, (rows, length), generator=random).to(torch.int32),
        "presence": torch.linspace(-2, 2, rows, dtype=torch.float64),
        "frequency": torch.linspace(0.5, -0.5, rows, dtype=torch.float64),
        "repetition": torch.linspace(0.7, 1.3, rows, dtype=torch.float64),
    }
    return {name: tensor.to(device) for name, tensor in arguments.items()}


def _mask(device: torch.device, rows: int, vocabulary: int) -> dict[str, Any]:
    # Nothing is masked here: the shared comparison subtracts, and infinity minus infinity is undefined.
    # test_sampling.py compares masked tokens exactly.
    words = torch.full((rows, -(-vocabulary // 32)), -1, dtype=torch.int32)
    logits = torch.randn(rows, vocabulary, generator=generator(vocabulary))
    return {"logits": logits.to(device), "bitmask": words.to(device)}


def _sample_case(kind: str, vocabulary: int, limits: list[_Limits], name: str, is_full: bool = False) -> Case:
    make = partial(_sample, kind=kind, vocabulary=vocabulary, limits=limits)
    return Case("sample", f"{name}-{kind}-{vocabulary}", make, is_full)


def _drafts(device: torch.device, kind: str, vocabulary: int, num_tokens: int | None) -> dict[str, Any]:
    """Columns of `vocabulary` tokens out of `num_tokens`, in no order; None: of all tokens."""
    limits = [_Limits(0.0, top_k=64), _Limits(0.6, 20, 0.95), _Limits(top_k=64), _Limits(1.3, 1, 0.5, 0.1)]
    arguments = _sample(device, kind, vocabulary, limits)
    if num_tokens is not None:
        listed = torch.randperm(num_tokens, generator=generator(num_tokens))[:vocabulary]
        arguments["token_ids"] = listed.to(device)
    return arguments


def _drafts_case(kind: str, vocabulary: int, num_tokens: int | None = None, is_full: bool = False) -> Case:
    make = partial(_drafts, kind=kind, vocabulary=vocabulary, num_tokens=num_tokens)
    of = f"-of-{num_tokens}" if num_tokens else ""
    return Case("sample_drafts", f"{kind}-{vocabulary}{of}", make, is_full)


CASES = [
    _sample_case("spread", 180, [_GREEDY, _PLAIN, _COMMON, *_CUT], "mixed"),
    _sample_case("ties", 257, [_GREEDY, _PLAIN, *_CUT], "mixed"),
    _sample_case("equal", 120, [_GREEDY, *_CUT, *_EDGES], "edges"),
    _sample_case("refused", 200, [_GREEDY, _PLAIN, *_CUT], "mixed"),
    _sample_case("spread", 5, [_GREEDY, _PLAIN, _COMMON, *_EDGES[:4]], "tiny"),
    _sample_case("spread", 40, [], "no-rows"),
    _sample_case("broken", 150, [_GREEDY] * 4 + [_PLAIN] * 4 + [_COMMON] * 4 + [_CUT[1]] * 4, "mixed"),
    _sample_case("spread", _VOCABULARY, [_GREEDY], "greedy", is_full=True),
    _sample_case("spread", _VOCABULARY, [_GREEDY, _PLAIN, _COMMON, *_CUT, *_EDGES], "mixed", is_full=True),
    _sample_case("ties", _VOCABULARY, [_GREEDY, _PLAIN, _COMMON, *_CUT, *_EDGES], "mixed", is_full=True),
    _sample_case("refused", _VOCABULARY, [_COMMON] * 3, "common", is_full=True),
    _sample_case("broken", _VOCABULARY, [_GREEDY] * 4 + [_PLAIN] * 4 + [_COMMON] * 4, "mixed", is_full=True),
    _drafts_case("spread", 180),
    _drafts_case("broken", 150),
    _drafts_case("spread", 96, 700),
    _drafts_case("broken", 150, 151),
    _drafts_case("spread", _VOCABULARY, is_full=True),
    _drafts_case("spread", 40_960, _VOCABULARY, is_full=True),
    *(
        Case("apply_penalties", f"{rows}x{vocabulary}x{length}", make, is_full, mutates=("logits",))
        for rows, vocabulary, length, is_full in [
            (1, 50, 7, False),
            (3, 130, 40, False),
            (2, 50, 0, False),
            (3, _VOCABULARY, 5000, True),
        ]
        for make in [partial(_penalties, rows=rows, vocabulary=vocabulary, length=length)]
    ),
    *(
        Case("apply_mask", f"{rows}x{vocabulary}", make, is_full, mutates=("logits",))
        for rows, vocabulary, is_full in [(1, 50, False), (3, 2100, False), (3, _VOCABULARY, True)]
        for make in [partial(_mask, rows=rows, vocabulary=vocabulary)]
    ),
]
