"""The operations of a decode step in few launches: a row's bits do not depend on its company, from end to end.

Each output is [rows, ...] or parts [parts, rows, ...]; parts are turned so that rows come first.
"""

import pytest
import torch

from onebox.kernels.common.float_weight import FloatWeight
from onebox.kernels.common.rows import FixedRows
from onebox.kernels.experts.cases import int_experts
from onebox.kernels.float_linear.cases import float_weight
from onebox.kernels.int_linear.cases import matrix
from tests.conftest import HAS_GPU
from tests.kernels.catalogue import forms
from tests.kernels.company import assert_rows_stand_alone

HIDDEN, INNER, EXPERTS, TOP = 256, 128, 6, 2
EPS = 1e-6


def by_row(parts: torch.Tensor) -> torch.Tensor:
    return parts.transpose(0, 1)


def check_rows_are_independent(module: str, device: torch.device, counts: tuple[int, ...], dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(device)

    rows = max(counts)
    residual, parts, weight = 3 * normal(rows, HIDDEN), normal(3, rows, HIDDEN), 0.1 * normal(HIDDEN)
    shared, share = normal(2, rows, HIDDEN), torch.sigmoid(normal(rows))
    int4 = [tensor.to(device) for tensor in matrix(48, HIDDEN, 4)]
    int8 = [tensor.to(device) for tensor in matrix(32, HIDDEN, 8)]
    router = float_weight("bf16", normal(EXPERTS + 1, HIDDEN).cpu() / 16, device)
    gate_up = float_weight("block", normal(2 * INNER, HIDDEN).cpu() / 16, device)
    down: FloatWeight = float_weight("block", normal(HIDDEN, INNER).cpu() / 11, device)
    tensors = {
        name: tensor.to(device) for name, tensor in int_experts(EXPERTS, HIDDEN, INNER, torch.float16, draw).items()
    }

    def outputs(chosen: slice) -> list[torch.Tensor]:
        given = (residual[chosen], parts[:, chosen], weight, EPS, dtype, shared[:, chosen].contiguous(), share[chosen])
        fixed, total = forms(module).add_rms_norm_fused(*given)
        router_parts = forms(module).float_parts(fixed, router)
        ids, weights, own, gate_up_parts = forms(module).route_fused(router_parts, TOP, fixed, gate_up)
        slots, inner, down_parts = forms(module).routed_experts_int4_fused(
            fixed, ids, weights, **tensors, shared=(gate_up_parts, down)
        )
        normed, same_total, undivided = forms(module).add_rms_norm_router(*given[:5], router.codes)
        linears = forms(module)
        heads = total.view(len(total), HIDDEN // 128, 128)
        gated = forms(module).gated_norm_fused(heads, parts[:, chosen], weight[:128], EPS, dtype)
        return [
            *_parts_of(fixed),
            total,
            by_row(linears.int4_parts(fixed, *int4)),
            by_row(linears.int8_parts(fixed, *int8)),
            by_row(router_parts),
            by_row(gate_up_parts),
            ids,
            weights,
            own,
            inner,
            slots,
            by_row(down_parts),
            *_parts_of(gated),
            *_parts_of(normed),
            same_total,
            by_row(undivided),
        ]

    assert_rows_stand_alone(outputs, counts)


def _parts_of(rows: FixedRows) -> list[torch.Tensor]:
    return [part for part in rows[:4] if part is not None]


@pytest.mark.skipif(HAS_GPU, reason="there the same runs on the GPU")
@pytest.mark.parametrize(("module", "dtype"), [("reference", torch.float32), ("kernel", torch.bfloat16)])
def test_a_row_does_not_depend_on_its_company(module, dtype):
    check_rows_are_independent(module, torch.device("cpu"), (3, 18), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_does_not_depend_on_its_company_on_the_gpu(device, dtype):
    check_rows_are_independent("kernel", device, (2, 4, 5, 12, 33, 64, 96, 128), dtype)
