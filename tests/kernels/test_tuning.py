"""Launch options: a GPU's table holds over the defaults, the user's own over the one that ships."""

import json
from pathlib import Path

import pytest
import torch

import onebox.kernels
from onebox.kernels.common import tuning
from onebox.kernels.common.tuning import MODES, WEIGHT_LOADS, Tunable
from tests.kernels.catalogue import operations

SHIPPED = Path(onebox.kernels.__file__).parent / "tuned"


@pytest.fixture
def kernel(monkeypatch):
    """A tunable of its own, under a name that the shipped table has; it leaves no trace."""
    monkeypatch.setattr(tuning, "_tunables", {})
    monkeypatch.setattr(tuning, "_launched", {})
    return Tunable("gate_up", WEIGHT_LOADS)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with an H200 as far as tables are concerned, and an empty cache."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning._table.cache_clear()
    yield tmp_path
    tuning._table.cache_clear()
    tuning.set_options({})


def shipped() -> dict[str, dict[str, int]]:
    return json.loads((SHIPPED / "nvidia-h200.json").read_text())["options"]


def test_without_a_gpu_the_defaults_hold(kernel):
    assert kernel.options("one_24", {"UNROLL": 4, "maxnreg": 128}) == {"UNROLL": 4, "maxnreg": 128}


def test_the_shipped_table_holds_over_the_defaults_and_adds_no_option(gpu, kernel):
    assert kernel.options("one_24", {"UNROLL": 1}) == {"UNROLL": shipped()["gate_up_one_24"]["UNROLL"]}
    assert kernel.options("never heard of", {"UNROLL": 1}) == {"UNROLL": 1}


def test_an_entry_of_the_user_goes_before_the_shipped_one_and_the_others_stay(gpu, kernel):
    path = tuning.user_table("NVIDIA H200")
    assert path.is_relative_to(gpu)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"options": {"gate_up_one_24": {"UNROLL": 3}}}))
    assert kernel.options("one_24", {"UNROLL": 1}) == {"UNROLL": 3}
    assert kernel.options("many_24", {"UNROLL": 1}) == {"UNROLL": shipped()["gate_up_many_24"]["UNROLL"]}


def test_what_is_set_for_tuning_holds_over_everything(gpu, kernel):
    tuning.set_options({"gate_up_one_24": {"UNROLL": 5}})
    assert kernel.options("one_24", {"UNROLL": 1, "maxnreg": 9})["UNROLL"] == 5


def test_a_launch_is_known_by_name_and_shape_until_it_is_forgotten(kernel):
    kernel.options("one_24", {"UNROLL": 1})
    kernel.options("few_24", {"UNROLL": 1})
    assert tuning.launched(forget=True) == {"gate_up_one_24": kernel, "gate_up_few_24": kernel}
    assert tuning.launched() == {}


def test_two_kernels_cannot_share_a_name(kernel):
    with pytest.raises(ValueError, match="gate_up"):
        Tunable("gate_up")


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_a_shipped_table_names_its_gpu_and_only_options_that_are_tried(path):
    for operation in operations().values():  # importing a kernel's module declares what it has to tune
        assert operation.kernel
    table = json.loads(path.read_text())
    assert tuning.table_name(table["gpu"]) == path.name
    assert table["shapes"]
    for key, options in table["options"].items():
        owners = [kernel for name, kernel in tuning.tunables().items() if key.startswith(f"{name}_")]
        assert owners, f"{key} belongs to no kernel"
        assert set(options) <= {name for kernel in owners for tried in kernel.tried for name in tried}, key


def test_every_tunable_kernel_of_a_step_is_tried_in_all_modes_of_launch():
    for operation in operations().values():
        assert operation.kernel
    choices = ("prefill_", "experts_grouping")  # the latter is which kernels are launched, not how
    of_steps = [kernel for kernel in tuning.tunables().values() if not kernel.name.startswith(choices)]
    assert len(of_steps) >= 15
    for kernel in of_steps:
        assert set(map(str, MODES)) <= set(map(str, kernel.tried)), kernel.name
