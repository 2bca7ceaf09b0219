"""The network that is trained computes what the reference computes, block by block."""

import torch

from onebox.model import dflash_reference
from onebox.model.random import TINY
from onebox.spec.dflash_config import drafter_from_config
from recipes.pocket.drafter.network import DrafterNetwork, draw_drafter
from tests.drafters import random_drafter_weights, small_drafter_config


def test_blocks_of_many_anchors_equal_the_reference_one_by_one():
    spec = drafter_from_config(small_drafter_config(TINY))
    weights, random = random_drafter_weights(spec, seed=3), torch.Generator().manual_seed(1)
    features = torch.randn(2, 24, spec.feature_size, generator=random)
    embedded = torch.randn(2, 3, 5, spec.hidden_size, generator=random)
    anchors = torch.tensor([[0, 7, 23], [3, 9, 9]])
    hidden = DrafterNetwork(spec).hidden(weights, features, embedded, anchors)
    for row in range(2):
        for number, anchor in enumerate(anchors[row].tolist()):
            context = dflash_reference.DraftContext.empty(spec)
            dflash_reference.extend(spec, weights, features[row, :anchor], context)
            alone = dflash_reference.draft(spec, weights, embedded[row, number], context)
            torch.testing.assert_close(hidden[row, number], alone, rtol=1e-4, atol=1e-5)


def test_the_drawn_weights_are_those_of_the_config():
    spec = drafter_from_config(small_drafter_config(TINY))
    assert {name: tuple(w.shape) for name, w in draw_drafter(spec).items()} == {
        module.plain_tensor: module.shape for module in spec.modules()
    }
