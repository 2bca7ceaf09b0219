"""The router: which k of E experts a row goes to, and how much each counts.

The k largest logits are chosen, equal ones by the lower id, and softmax runs over the chosen alone: the softmax over
all E is monotone and its denominator cancels when the k weights are made to sum 1. So the ids are the same on every
device. `route` takes logits. `route_fused` takes the router's parts, whose last column is the logit of the shared
expert's gate, and computes the shared expert's gate_up in the same launch.
"""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.router import reference

__all__ = ["route", "route_fused"]

route = Operation(reference.route, "kernel", cpu="cpu")
route_fused = Operation(reference.route_fused, "kernel")
