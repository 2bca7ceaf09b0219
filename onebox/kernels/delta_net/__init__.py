"""Gated DeltaNet: decode step with late commit (plain, fused), chunked prefill, and the gated norm after both."""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.delta_net import reference

__all__ = ["delta_net_prefill", "delta_net_step", "delta_net_step_fused", "gated_norm", "gated_norm_fused"]

delta_net_step = Operation(reference.delta_net_step, "step", cpu="cpu")
delta_net_step_fused = Operation(reference.delta_net_step_fused, "step")
delta_net_prefill = Operation(reference.delta_net_prefill, "prefill")
gated_norm = Operation(reference.gated_norm, "norm", cpu="cpu")
gated_norm_fused = Operation(reference.gated_norm_fused, "norm")
