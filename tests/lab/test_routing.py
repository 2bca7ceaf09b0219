"""The experts that a step reads: counted from the router's own choices, for the rows that are asked for."""

import pytest
import torch

from onebox.lab.decode import DecodeRow, measure, with_experts
from onebox.lab.routing import count_experts, expected_experts
from onebox.model.dummy import dummy_model
from onebox.model.layers import plain
from onebox.spec.model import spec_from_config
from tests.synthetic import tiny_config


@pytest.fixture(scope="module")
def spec():
    return spec_from_config(tiny_config())


def test_distinct_experts_are_counted_over_choices_of_so_many_rows_and_blank_rows_are_left_out(spec):
    logits = torch.zeros(3, spec.num_experts)
    logits[0, :2] = logits[1, :2] = logits[2, 1:3] = torch.tensor([2.0, 1.0])
    before = plain.route
    with count_experts(spec, 3) as counted:
        plain.route(logits, 2)
        plain.route(logits, 2, torch.tensor([2], dtype=torch.int32))
        plain.route(logits[:1], 2)  # another number of rows
    assert counted[0].mean == 2.5
    assert plain.route is before


def test_rows_that_choose_independently_share_some_experts(spec):
    assert expected_experts(spec, 1) == pytest.approx(spec.num_experts_per_tok)
    assert spec.num_experts_per_tok < expected_experts(spec, 2) < 2 * spec.num_experts_per_tok
    assert expected_experts(spec, 1000) == pytest.approx(spec.num_experts)


def test_what_was_not_counted_is_not_told(spec):
    row = DecodeRow("row", streams=1, context=9, num_tokens=4)
    model = dummy_model(spec, {}, torch.device("cpu"), torch.float32)  # a compiled layer routes by itself
    found = with_experts(measure(model, row, ceiling=1e10), model, row)
    assert found.experts_per_layer is None


@pytest.mark.gpu
@pytest.mark.parametrize(("streams", "drafts"), [(1, 0), (3, 0), (2, 2)])
def test_the_experts_of_a_step_are_counted_on_the_gpu(spec, streams, drafts):
    model = dummy_model(spec, {}, torch.device("cuda"))
    row = DecodeRow("row", streams=streams, drafts=drafts, context=70, num_tokens=8)
    found = with_experts(measure(model, row, ceiling=1e10), model, row)
    num_rows = streams * (1 + drafts)
    most = min(spec.num_experts, spec.num_experts_per_tok * num_rows)
    assert spec.num_experts_per_tok <= found.experts_per_layer <= most
    if num_rows == 1:
        assert found.experts_per_layer == found.expected_experts == spec.num_experts_per_tok
