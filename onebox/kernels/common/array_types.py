"""Types of the numpy arrays in CPU operations, for code that does not import torch."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "Stored"]

Array = NDArray[np.float32]
Stored = Array | NDArray[np.uint16]
"""float32 numbers, or bfloat16 numbers as raw bits."""
