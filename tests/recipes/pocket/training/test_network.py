"""The network that is trained: its size, its batches, its losses."""

import torch

from onebox.spec.model import spec_from_config
from recipes.pocket.config import TOY, num_parameters, pocket_config
from recipes.pocket.training.delta_rule import plain_delta_rule
from recipes.pocket.training.network import BatchLayout, TrainingNetwork, draw_weights, token_losses

SPEC = spec_from_config(TOY)
CPU = torch.device("cpu")


def test_the_pocket_model_fits_into_38_megabytes_of_bf16():
    assert 2 * num_parameters(spec_from_config(pocket_config(8166))) <= 38e6


def test_sequences_of_a_batch_do_not_see_each_other():
    network, weights = TrainingNetwork(SPEC, plain_delta_rule), draw_weights(SPEC)
    tokens = torch.randint(SPEC.vocab_size, (2, 20), generator=torch.Generator().manual_seed(0))
    both, _ = network.hidden(weights, tokens.flatten(), BatchLayout.of(SPEC, 2, 20, CPU))
    alone, _ = network.hidden(weights, tokens[1], BatchLayout.of(SPEC, 1, 20, CPU))
    torch.testing.assert_close(both[20:], alone)


def test_token_losses_are_cross_entropies():
    hidden, head = torch.randn(5, 8), torch.randn(11, 8)
    labels = torch.tensor([0, 10, 3, 3, 7])
    expected = torch.nn.functional.cross_entropy(hidden @ head.T, labels, reduction="none")
    torch.testing.assert_close(token_losses(hidden, head, labels), expected)
