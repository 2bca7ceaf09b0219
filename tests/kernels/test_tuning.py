"""Launch choices: a GPU's table holds over the defaults, the user's own over the one that ships."""

import json
from pathlib import Path

import pytest
import torch

import onebox.kernels
from onebox.kernels.common import tuning
from onebox.lab.tune import STEPS, few_layers, options
from onebox.spec.shapes import named_spec

SHIPPED = Path(onebox.kernels.__file__).parent / "tuned"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with an H200 as far as tables are concerned, and an empty cache."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning._table.cache_clear()
    yield tmp_path
    tuning._table.cache_clear()
    tuning.set_choices({})


def test_without_a_gpu_the_defaults_hold():
    assert tuning.choose("gate_up_one", {"UNROLL": 4, "maxnreg": 128}) == {"UNROLL": 4, "maxnreg": 128}


def test_the_shipped_table_holds_over_the_defaults_and_adds_no_option(gpu):
    shipped = json.loads((SHIPPED / "nvidia-h200.json").read_text())["choices"]
    assert tuning.choose("gate_up_one", {"UNROLL": 1}) == {"UNROLL": shipped["gate_up_one"]["UNROLL"]}
    assert tuning.choose("never heard of", {"UNROLL": 1}) == {"UNROLL": 1}


def test_the_users_table_is_read_before_the_shipped_one(gpu):
    path = tuning.user_table("NVIDIA H200")
    assert path.is_relative_to(gpu)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"choices": {"gate_up_one": {"UNROLL": 3}}}))
    assert tuning.choose("gate_up_one", {"UNROLL": 1}) == {"UNROLL": 3}


def test_what_is_set_for_tuning_holds_over_everything(gpu):
    tuning.set_choices({"gate_up_one": {"UNROLL": 5}})
    assert tuning.choose("gate_up_one", {"UNROLL": 1, "maxnreg": 9})["UNROLL"] == 5


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_table_names_its_gpu_and_only_choices_that_are_tried(path):
    table = json.loads(path.read_text())
    assert tuning.table_name(table["gpu"]) == path.name
    tried = {(kernel, name) for step in STEPS for kernel, option in options(step) for name in option}
    assert {(kernel, name) for kernel, choice in table["choices"].items() for name in choice} <= tried


def test_a_few_layers_are_the_first_ones():
    spec = named_spec("qwen3.5-122b-a10b")
    assert few_layers(spec, 4).layer_types == spec.layer_types[:4]
    assert few_layers(spec, 4).num_hidden_layers == 4
