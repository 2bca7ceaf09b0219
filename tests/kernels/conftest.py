"""Where kernels run: on a GPU if there is one, else in Triton's interpreter; that is chosen before Triton loads."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

_SPILLS: list[str] = []


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture
def poison(monkeypatch):
    """Memory that nobody wrote holds NaN (floats) or an absurd number, not zeros that look right."""

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


@pytest.fixture
def spills() -> list[str]:
    """Lines about kernels that spill registers, printed at the end of the run."""
    return _SPILLS


def pytest_terminal_summary(terminalreporter) -> None:
    for line in _SPILLS:
        terminalreporter.write_line(f"spills: {line}")
