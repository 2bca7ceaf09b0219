"""The tolerance table of the kernels, which `onebox doctor` uses too."""

from onebox.kernels.common.tolerance import MIXERS, TOLERANCE, assert_same

__all__ = ["MIXERS", "TOLERANCE", "assert_same"]
