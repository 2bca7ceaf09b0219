"""What numpy arrays of a CPU's operations hold, for code that does without torch."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "Stored"]

Array = NDArray[np.float32]
Stored = Array | NDArray[np.uint16]
"""float32 numbers, or bfloat16 ones as their bits."""
