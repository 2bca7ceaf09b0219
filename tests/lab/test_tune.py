"""What `onebox tune` tries follows from the kernels that a model's step launches."""

from onebox.kernels.common.tuning import MODES, WEIGHT_LOADS
from onebox.lab.tune import few_layers, trials
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
