"""Shared by several operations: dispatch, launch options, fixed-point rows, row-invariant arithmetic for CPUs."""
