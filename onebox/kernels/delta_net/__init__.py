"""Gated DeltaNet: a decode step that commits late (plain, fused), chunked prefill, and the gated norm behind both."""

from onebox.kernels.common.dispatch import Operation
from onebox.kernels.delta_net import reference

__all__ = ["delta_net_prefill", "delta_net_step", "delta_rows", "delta_step", "gated_norm"]

delta_net_step = Operation(reference.delta_net_step, "kernel", cpu="cpu")
delta_step = Operation(reference.delta_step, "kernel")
delta_net_prefill = Operation(reference.delta_net_prefill, "kernel")
gated_norm = Operation(reference.gated_norm, "kernel", cpu="cpu")
delta_rows = Operation(reference.delta_rows, "fused")
