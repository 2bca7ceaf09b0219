"""Types of the numpy arrays in CPU operations, for code that does not import torch."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "Stored", "StoredState"]

Array = NDArray[np.float32]
Stored = Array | NDArray[np.uint16]
"""float32 numbers, or bfloat16 numbers as raw bits."""
StoredState = Stored | NDArray[np.int16]
"""As `Stored`, or float16 numbers as raw bits: signed, so that compiled code tells them from bfloat16 by their type."""
