"""Tensors on a CPU as numpy arrays, for operations on a few rows: a call of numpy costs a third of one of torch.

Arrays are float32 and share the memory of float32 tensors. What is computed on them here keeps a number's bits apart
from its place: the four operations, exp and log do, and sums run along the last axis of contiguous arrays.
"""

import numpy as np
import torch
from torch import Tensor

from onebox.kernels.common.array_types import Array, Stored

__all__ = ["Array", "Stored", "array", "inverse_rms", "quietly", "sigmoid", "silu", "stored", "tensor"]

quietly = np.errstate(all="ignore")
"""Decorates an operation: what overflows is infinite and what is undefined is NaN, as in torch, without a warning."""


def array(x: Tensor) -> Array:
    """The numbers of any float tensor, float32."""
    found: Array = (x if x.dtype is torch.float32 else x.to(torch.float32)).numpy()
    return found


def tensor(x: Array, dtype: torch.dtype) -> Tensor:
    """The numbers as a tensor of this dtype."""
    found = torch.from_numpy(x)
    return found if dtype is torch.float32 else found.to(dtype)


def stored(x: Tensor) -> Stored:
    """The tensor's own memory."""
    found: Stored = (x.view(torch.uint16) if x.dtype is torch.bfloat16 else x).numpy()
    return found


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
    """One over the root of the mean square along the last axis, which stays with length one; x is contiguous."""
    mean = np.add.reduce(x * x, axis=-1, keepdims=True)
    mean *= np.float32(1 / x.shape[-1])
    mean += np.float32(eps)
    np.sqrt(mean, mean)
    return np.reciprocal(mean, mean)
