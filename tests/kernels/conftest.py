"""The device that kernels are tested on, and poisoned memory."""

import pytest
import torch

from tests.conftest import HAS_GPU


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture
def poison(monkeypatch):
    """Uninitialised memory holds NaN (floats) or an absurd number, not zeros that look right."""

    def poisoned(make):
        def wrapped(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.dtype == torch.uint8 or tensor.dtype == torch.bool or tensor.dtype.itemsize == 1:
                return tensor.view(torch.uint8).fill_(0x7F).view(tensor.dtype)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else 0x5A5A)

        return wrapped

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
