"""The router's choice: which experts a row goes to, and how much each counts; alone, and fused for decode."""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.router import reference

__all__ = ["route", "route_shared"]

route = Operation(reference.route, "kernel", cpu="cpu")
route_shared = Operation(reference.route_shared, "fused")
