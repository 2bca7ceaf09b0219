"""What `onebox tune` tries follows from the kernels that a step launches, and no kind of step pays for another."""

import pytest
import torch

from onebox.kernels.common.tuning import MODES, WEIGHT_LOADS
from onebox.lab import tune
from onebox.lab.tune import StepShape, few_layers, trials
from onebox.spec.errors import UsageError
from onebox.spec.shapes import named_spec


class Kernel:
    def __init__(self, tried):
        self.tried = tried


def test_modes_of_launch_are_tried_first_and_those_of_the_weights_readers_before_the_others():
    found = list(trials({"add_norm_2048": Kernel(MODES), "int4_8_16": Kernel(WEIGHT_LOADS)}))
    assert [key for key, _ in found[:6]] == ["int4_8_16"] * 3 + ["add_norm_2048"] * 3
    assert all(option in MODES for _, option in found[:6])
    assert [key for key, _ in found[6:]] == ["int4_8_16"] * (len(WEIGHT_LOADS) - len(MODES))


def test_a_few_layers_are_the_first_ones():
    spec = named_spec("qwen3.5-122b-a10b")
    assert few_layers(spec, 4).layer_types == spec.layer_types[:4]
    assert few_layers(spec, 4).num_hidden_layers == 4


class Step:
    """A step that takes 1 ms, or what `milliseconds_by` has for the launch mode of its only kernel."""

    def __init__(self, milliseconds_by):
        self.kernels = {"int4_8_16": Kernel(MODES)}
        self.best_ms = 1.0
        self._milliseconds_by = milliseconds_by

    def milliseconds(self, options):
        return self._milliseconds_by.get(options.get("int4_8_16", {}).get("dependent"), 1.0)


def test_an_option_is_kept_if_the_step_gets_faster_and_no_other_step_gets_slower():
    step, other, third = Step({0: 0.9, 2: 0.5}), Step({0: 0.8, 2: 1.1}), Step({0: 0.7, 2: 0.6})
    kept = []
    found = tune._descend(step, [third, other], {}, float("inf"), lambda name, taken: kept.append((name, taken)))
    assert found == {"int4_8_16": {"dependent": 0}}
    assert kept == [("int4_8_16 {'dependent': 0}", 0.9)]
    # What was refused because of one step does not count for another.
    assert (step.best_ms, other.best_ms, third.best_ms) == (0.9, 0.8, 0.7)
    assert tune._descend(Step({2: 0.5}), [], {}, float("inf"), lambda *_: None) == {"int4_8_16": {"dependent": 2}}


def test_the_timed_steps_rows_follow_a_page_of_context_each_in_pages_of_its_own():
    batch = tune._batch(StepShape(4, 3), torch.device("cpu"))
    assert batch.cu_rows.tolist() == [0, 3, 6, 9, 12]
    assert batch.seen.tolist() == [67] * 4
    assert batch.positions[0].tolist() == [64, 65, 66] * 4
    assert batch.slot_mapping.tolist() == [64 * page + place for page in (2, 4, 6, 8) for place in range(3)]


def test_a_kind_of_step_is_written_as_streams_by_rows_and_a_kv_format():
    assert StepShape.parse("32x3") == StepShape(32, 3)
    assert StepShape.parse("1x1:turboquant") == StepShape(1, 1, "turboquant")
    for wrong in ("32", "0x3", "64x3", "1x1:fp3"):
        with pytest.raises(UsageError):
            StepShape.parse(wrong)
