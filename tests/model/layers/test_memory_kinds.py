"""A layer given the other kind's memory is an error that names both, in every implementation, in decode and prefill."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onebox.model import compiled
from onebox.model.build import fuse_model
from onebox.model.layers.compiled import CompiledLayer
from onebox.model.layers.fused import FusedLayer
from onebox.model.layers.plain import PlainLayer
from onebox.model.load import load_model
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.errors import MismatchError
from tests.model.opened import packed_model
from tests.model.test_qwen3_5 import PROMPT, Session, start
from tests.synthetic import tiny_config, write_checkpoint

CPU = torch.device("cpu")
KINDS = {"compiled": CompiledLayer, "plain": PlainLayer, "fused": FusedLayer}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("kinds") / "autoround"
    write_checkpoint(root, "autoround", config=tiny_config(num_experts_per_tok=4))
    return root


@pytest.fixture(params=KINDS)
def model(request, directory, monkeypatch) -> Qwen35:
    if request.param == "fused":
        made = fuse_model(packed_model(directory))
    else:
        if request.param == "plain":
            monkeypatch.setattr(compiled, "is_available", lambda: False)
        made = load_model(directory, CPU, torch.float32)
    assert all(isinstance(layer, KINDS[request.param]) for layer in made.stack.layers)
    return made


def session_with(model: Qwen35, layer: int, other: int) -> Session:
    """A session whose memory of one layer is that of another."""
    session = start(model)
    layers = list(session.memory.layers)
    layers[layer] = layers[other]
    session.memory = replace(session.memory, layers=tuple(layers))
    return session


@torch.inference_mode()
def test_an_attention_layer_with_a_pool_of_states_is_refused_by_name(model):
    attention, delta_net = model.spec.full_layers[0], model.spec.linear_layers[0]
    session = session_with(model, attention, delta_net)
    message = "attention layer was given a DeltaPool: it needs KVPages"
    with pytest.raises(MismatchError, match=message):
        session.step(PROMPT[:1], keep=1)
    with pytest.raises(MismatchError, match=message):
        session.prefill(PROMPT[:5])


@torch.inference_mode()
def test_a_delta_net_layer_with_pages_is_refused_by_name(model):
    attention, delta_net = model.spec.full_layers[0], model.spec.linear_layers[0]
    session = session_with(model, delta_net, attention)
    message = "DeltaNet layer was given KVPages: it needs a DeltaPool"
    with pytest.raises(MismatchError, match=message):
        session.step(PROMPT[:1], keep=1)
    with pytest.raises(MismatchError, match=message):
        session.prefill(PROMPT[:5])
