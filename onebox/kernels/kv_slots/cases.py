"""Tokens of some sequences, some of none, some beyond the table."""

from functools import partial
from typing import Any

import torch

from onebox.kernels.case import Case, generator

__all__ = ["CASES"]

_PAGE = 64


def _inputs(device: torch.device, tokens: int, sequences: int, pages: int) -> dict[str, Any]:
    draw = generator(tokens + sequences)
    tensors = {
        "page_table": torch.randint(0, 2**24, (sequences, pages), generator=draw, dtype=torch.int32),
        "sequences": torch.randint(0, sequences + 1, (tokens,), generator=draw),
        "positions": torch.randint(0, (pages + 1) * _PAGE, (tokens,), generator=draw),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()} | {"page_tokens": _PAGE}


def _case(tokens: int, sequences: int, pages: int, is_full: bool = False) -> Case:
    make = partial(_inputs, tokens=tokens, sequences=sequences, pages=pages)
    return Case("kv_slots", f"{tokens}-tokens-{sequences}x{pages}-pages", make, is_full)


CASES = [_case(1, 1, 1), _case(9, 3, 4), _case(70, 8, 2), _case(0, 1, 1), _case(64, 16, 4096, is_full=True)]
