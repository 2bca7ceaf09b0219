"""Tensors on a CPU as numpy arrays, for operations on a few rows: a numpy call costs a third of a torch call.

Arrays are float32 and share the memory of float32 tensors. Results do not depend on a number's place in its array: this
holds for the four operations, exp and log, and for sums along the last axis of contiguous arrays.
"""

import numpy as np
import torch
from torch import Tensor

from onebox.kernels.common.array_types import Array, Stored, StoredState

__all__ = ["Array", "Stored", "array", "inverse_rms", "quietly", "sigmoid", "silu", "stored", "stored_state", "tensor"]

quietly = np.errstate(all="ignore")
"""Decorator of an operation: overflow gives infinity and undefined results NaN, as in torch, without a warning."""


def array(x: Tensor) -> Array:
    """The values of any float tensor, as float32."""
    found: Array = (x if x.dtype is torch.float32 else x.to(torch.float32)).numpy()
    return found


def tensor(x: Array, dtype: torch.dtype) -> Tensor:
    """The values as a tensor of this dtype."""
    found = torch.from_numpy(x)
    return found if dtype is torch.float32 else found.to(dtype)


def stored(x: Tensor) -> Stored:
    """A view of the tensor's memory."""
    found: Stored = (x.view(torch.uint16) if x.dtype is torch.bfloat16 else x).numpy()
    return found


def stored_state(x: Tensor) -> StoredState:
    """The same of a tensor that may also be float16."""
    return x.view(torch.int16).numpy() if x.dtype is torch.float16 else stored(x)


def sigmoid(x: Array) -> Array:
    """A new array."""
    over = _one_over_sigmoid(x)
    return np.reciprocal(over, over)


def silu(x: Array) -> Array:
    """The product of x and its sigmoid, a new array."""
    over = _one_over_sigmoid(x)
    return np.divide(x, over, over)


def _one_over_sigmoid(x: Array) -> Array:
    share = np.negative(x)
    np.exp(share, share)
    share += 1
    return share


def inverse_rms(x: Array, eps: float) -> Array:
    """1 / sqrt(mean square + eps) along the last axis, kept with length one; x is contiguous."""
    mean = np.add.reduce(x * x, axis=-1, keepdims=True)
    mean *= np.float32(1 / x.shape[-1])
    mean += np.float32(eps)
    np.sqrt(mean, mean)
    return np.reciprocal(mean, mean)
