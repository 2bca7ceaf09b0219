"""Random weights in the kernels' layouts, without files."""

import json

import pytest
import torch

from onebox.model.build import build_model
from onebox.model.compiled.linear import CompiledLinear
from onebox.model.dummy import DUMMY_FORMATS, HYBRID, DummyParts
from onebox.model.experts import Fp8Experts, IntExperts, Nvfp4Experts
from onebox.model.head import PlaneHead
from onebox.model.linear import DecodeActivations, Fp8Linear
from onebox.model.load import LoadFormat, load_model
from onebox.spec.errors import UnreadableError
from onebox.spec.model import spec_from_config
from tests.model.opened import CPU, tensors_in
from tests.synthetic import tiny_config


def test_dummy_weights_need_no_file_but_the_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    model = load_model(tmp_path, CPU, torch.float32, LoadFormat.DUMMY)
    assert model.mtp is not None
    spreads = [float(tensor.std()) for tensor in tensors_in(model.stack) if tensor.numel() > 1000]
    assert all(0.015 < spread < 0.025 for spread in spreads)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UnreadableError, match=r"config\.json"):
        load_model(tmp_path, CPU, torch.float32, LoadFormat.DUMMY)


class CpuDummy(DummyParts):
    """What is drawn for a GPU, drawn here."""

    def __init__(self, spec, formats=HYBRID) -> None:
        super().__init__(spec, formats, CPU)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvfp4", Nvfp4Experts),
        ("fp8", Fp8Experts),
        ("int4", IntExperts),
        ("hybrid-int34", IntExperts),
        ("hybrid-int2", IntExperts),
    ],
)
def test_dummy_experts_of_every_format_have_the_spread_of_a_weight(name, kind):
    spec = spec_from_config(tiny_config(mtp_num_hidden_layers=0))
    experts = build_model(spec, CpuDummy(spec, DUMMY_FORMATS[name]), torch.float32).stack.layers[0].mixture.experts
    assert isinstance(experts, kind)
    rows = torch.eye(spec.hidden_size, dtype=torch.float32)[:64]
    ids, weights = torch.zeros(64, 1, dtype=torch.int32), torch.ones(64, 1)
    # Products of unit rows with gate and up, SiLU(g) * u of two numbers spread by 0.02, and down's sum over them.
    found = experts.decode(DecodeActivations(rows), ids, weights)
    expected = 0.02 * 0.02 / 2 * 0.02 * spec.moe_intermediate_size**0.5
    assert 0.5 < float(found.std()) / expected < 2
    assert abs(float(found.mean())) < 0.2 * float(found.std())


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 192, "moe_intermediate_size": 64}], ids=["tiles", "no tiles"])
def test_dummy_weights_are_hybrid_where_their_sizes_have_tiles(sizes):
    spec = spec_from_config(tiny_config(**sizes, mtp_num_hidden_layers=0))
    model = build_model(spec, CpuDummy(spec), torch.float32)
    assert model.mtp is None
    mixture = model.stack.layers[0].mixture
    assert isinstance(mixture.experts, IntExperts) == (not sizes)
    assert isinstance(mixture.shared_gate_up, Fp8Linear)
    assert isinstance(model.lm_head, CompiledLinear if sizes else PlaneHead)
