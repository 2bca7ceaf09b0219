"""What each token's error counts."""

import pytest
import torch

from onebox.model.random import TINY
from onebox.quantize.uncertainty import LOGIT_ROWS, token_weights
from onebox.spec.model import spec_from_config

SPEC = spec_from_config(TINY)


def weights_of(stream: torch.Tensor) -> torch.Tensor:
    """Of a model without blocks, whose head gives the first direction of the stream to the first token alone."""
    head = torch.zeros(50, SPEC.hidden_size)
    head[0, 0] = 40.0
    return token_weights(SPEC, [], stream, torch.zeros(SPEC.hidden_size), head)


def test_a_token_before_a_certain_one_counts_least_and_not_nothing():
    stream = torch.zeros(3, LOGIT_ROWS - 7, SPEC.hidden_size)
    stream[..., 1] = 1.0
    stream[:, ::2] = stream[:, ::2].roll(-1, dims=-1)
    found = weights_of(stream)
    assert found.shape == stream.shape[:-1]
    assert found.mean() == pytest.approx(1.0)
    assert found[:, ::2].max() < 0.1 * found[:, 1::2].min()
    assert found.min() > 0.05


def test_tokens_count_the_same_where_all_are_certain():
    stream = torch.zeros(1, 9, SPEC.hidden_size)
    stream[..., 0] = 1.0
    assert torch.allclose(weights_of(stream), torch.ones(1, 9))
