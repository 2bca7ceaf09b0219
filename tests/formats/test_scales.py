import pytest
import torch

from onebox.formats import Dialect, quantize, quantize_fp8_block, quantize_fp8_rows, quantize_fp8_tensor, quantize_nvfp4
from onebox.formats import scales as scales_room
from onebox.spec.errors import UnsupportedError
from tests.formats.strategies import KINDS, make_weight


def every_format(weight):
    """The bytes of a weight in each format that works in slabs of rows."""
    int4, int8 = quantize(weight, 4, 48, torch.float32), quantize(weight, 8, None, torch.float32)
    tensors = [int4.codes, int4.scales, int8.codes, int8.scales]
    for parts in (quantize_fp8_block(weight, 16), quantize_fp8_rows(weight), quantize_fp8_tensor(weight)):
        tensors.extend(parts)
    for dialect in Dialect:
        tensors.extend(quantize_nvfp4(weight, dialect))
    return [(list(tensor.shape), tensor.flatten().view(torch.uint8).tolist()) for tensor in tensors]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slab", [1, 200, 64 * 33])
def test_codes_do_not_depend_on_the_slabs_they_were_made_in(kind, slab, monkeypatch):
    weight = make_weight(37, 64, kind, seed=1)
    whole = every_format(weight)
    monkeypatch.setattr(scales_room, "SLAB_ELEMENTS", slab)
    assert every_format(weight) == whole


def test_a_bad_value_in_a_late_slab_is_found(monkeypatch):
    monkeypatch.setattr(scales_room, "SLAB_ELEMENTS", 8)
    weight = torch.ones(9, 8)
    weight[8, 7] = torch.nan
    with pytest.raises(UnsupportedError, match="infinite or NaN"):
        quantize(weight, 4, 4)
