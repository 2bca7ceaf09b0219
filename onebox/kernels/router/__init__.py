"""The router: the k of E experts of each row, and their weights.

The k largest logits are chosen, ties by the lower id, and the softmax is over the chosen logits only: the softmax over
all E is monotone and its denominator cancels when the k weights are normalised to sum 1. So the ids are the same on
every device. `route` takes logits. `route_fused` takes the parts (partial sums) of the router's linear, with the logit
of the shared expert's gate in the last column, and computes the shared expert's gate_up in the same launch.
`add_rms_norm_router` computes these parts together with the norm before them.
"""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.router import reference

__all__ = ["add_rms_norm_router", "route", "route_fused"]

route = Operation(reference.route, "kernel", cpu="cpu")
route_fused = Operation(reference.route_fused, "kernel")
add_rms_norm_router = Operation(reference.add_rms_norm_router, "norm")
