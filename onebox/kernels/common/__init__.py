"""What several operations share: dispatch, launch options, fixed-point rows, row-invariant arithmetic for CPUs."""
