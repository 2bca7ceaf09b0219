"""Checkpoints that several files of tests open."""

from pathlib import Path

import pytest
import torch

from onebox.formats import gptq_to_packed
from tests.synthetic import write_checkpoint


@pytest.fixture(scope="session")
def packed(tmp_path_factory) -> Path:
    """An INT4 checkpoint as compressed-tensors packs it."""

    def repack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".qweight")]:
            stem = name.removesuffix(".qweight")
            words, scales = gptq_to_packed(tensors.pop(name)), tensors.pop(f"{stem}.scales").t()
            del tensors[f"{stem}.qzeros"]
            shape = torch.tensor([words.shape[0], words.shape[1] * 8])
            tensors |= {f"{stem}.weight_packed": words, f"{stem}.weight_scale": scales, f"{stem}.weight_shape": shape}

    return write_checkpoint(tmp_path_factory.mktemp("packed") / "model", "autoround", change=repack)
