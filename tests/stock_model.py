"""A checkpoint as stock transformers opens it."""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForImageTextToText

__all__ = ["open_with_transformers"]


def open_with_transformers(directory: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model with every weight dequantised.

    Opened as most people do, without `CompressedTensorsConfig(dequantize=True)`: with it transformers 5.23 reads all
    layers but the experts by one group of the description, whatever their names.
    """
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=dtype)
    with torch.no_grad():
        # compressed-tensors dequantises layers at the first forward pass.
        logits = model(input_ids=torch.arange(16)[None]).logits
    assert bool(torch.isfinite(logits).all())
    return model
