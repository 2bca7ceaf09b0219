"""The tower that is trained is the family's own, on pictures of any size in one batch."""

from random import Random

import numpy as np
import pytest
import torch

from onebox.model.vision import Pixels, positions_for
from onebox.spec.model import spec_from_config
from onebox.text.patches import PictureReader
from recipes.pocket.config import SEEING_TOY, processor_configs
from recipes.pocket.pictures.workloads import PICTURES
from recipes.pocket.training.checkpoint import write_checkpoint, write_json
from recipes.pocket.training.feed import UNSEEN
from recipes.pocket.training.network import draw_weights
from recipes.pocket.training.picture_feed import PictureDrawer, PicturePool, RowShape
from recipes.pocket.training.vision import (
    PREFIX,
    PictureBatch,
    TowerFunctions,
    encode_pictures,
    place_pictures,
    under_prefix,
)
from tests.recipes.pocket.toy_pictures import source, toy_directory

SPEC = spec_from_config(SEEING_TOY)
KINDS = {name: place for place, name in enumerate((*PICTURES, UNSEEN), 1)}


@pytest.fixture(scope="module")
def pool() -> PicturePool:
    pool = PicturePool(RowShape(((112, 3), (1024, 2)), {"short line": 2.0, "scene": 1.0}), 2, 512)
    draw = PictureDrawer(source(), toy_directory(), KINDS)
    for seed in range(2):
        pool.make_row(draw, Random(seed))
    return pool


def batch(pool: PicturePool, size: int) -> PictureBatch:
    return pool.slots[size].batch(np.arange(2), 0, pool.length)


def test_embeddings_are_those_of_the_engines_tower_whatever_the_padding_and_the_pictures_beside(pool, tmp_path):
    from onebox.model.vision import load_tower

    weights = draw_weights(SPEC)
    weights |= {name: torch.randn_like(w) * 0.1 for name, w in weights.items() if name.endswith(".bias")}
    write_checkpoint(tmp_path, SEEING_TOY, weights)
    weights = {name: weight.bfloat16().float() for name, weight in weights.items()}
    for name, processor in processor_configs().items():
        write_json(tmp_path / name, processor)
    reader, tower = PictureReader.load(tmp_path, SPEC), load_tower(tmp_path)
    others = [batch(pool, 0), batch(pool, 1)]
    for name, size in (("short line", 0), ("scene", 1)):
        drawing = PICTURES[name](Random(5), source()).drawing
        slots = PicturePool(RowShape(((112, 1), (1024, 1)), {}), 1, 16).slots[size]
        slots.put(0, 0, drawing, 0)
        pictures = slots.batch(np.zeros(1, int), 0, 16)
        encoded = encode_pictures(SPEC.vision, under_prefix(weights, PREFIX), [*others, pictures], TowerFunctions())
        rows = encoded.rows[-1]
        picture = reader.open("image", _png(drawing))
        assert picture.num_tokens == drawing.num_tokens  # no line is resized
        theirs = tower.encode(Pixels(torch.from_numpy(picture.read()), torch.tensor([picture.grid])))
        assert (rows[0, : drawing.num_tokens] - theirs).abs().max() < 1e-5


def _png(drawing) -> bytes:
    import io

    out = io.BytesIO()
    drawing.image().save(out, "PNG")
    return out.getvalue()


def test_rows_place_pictures_and_positions_as_the_engine_does(pool):
    grids = {tuple(grid) for slots in pool.slots for grid in slots.grids.reshape(-1, 2).tolist() if grid[0]}
    assert len(grids) > 1
    for row in range(2):
        ids = torch.from_numpy(pool.ids[row].astype(np.int64))
        placed = [
            (slots.offsets[row, slot], slots.grids[row, slot])
            for slots in pool.slots
            for slot in range(slots.grids.shape[1])
            if slots.grids[row, slot, 0]
        ]
        in_order = torch.tensor([[1, *grid] for _, grid in sorted(placed, key=lambda pair: pair[0])])
        expected = positions_for(ids, in_order, None, SPEC)
        assert np.array_equal(expected.numpy(), pool.positions[row])
        for offset, grid in placed:
            count = int(grid.prod()) // 4
            assert (ids[offset : offset + count] == SPEC.image_token_id).all()
        assert ((pool.kinds[row] == KINDS[UNSEEN]) >= (pool.ids[row] == SPEC.image_token_id)).all()


def test_only_the_tokens_of_pictures_are_replaced(pool):
    pictures = batch(pool, 1)
    embedded = torch.zeros(2 * pool.length, 4)
    rows = torch.ones(len(pictures.patches), 256, 4)
    filled = place_pictures(embedded, pictures, rows)
    assert int(filled[:, 0].sum()) == int(pictures.grids.prod(1).sum()) // 4


def test_a_blank_slot_gives_no_gradient_and_no_nan(pool):
    empty = PicturePool(RowShape(((112, 2),), {}), 1, 16).slots[0].batch(np.zeros(1, int), 0, 16)
    weights = {name: w.requires_grad_() for name, w in under_prefix(draw_weights(SPEC), PREFIX).items()}
    encoded = encode_pictures(SPEC.vision, weights, [empty], TowerFunctions())
    assert encoded.stream.isfinite().all()
    place_pictures(torch.zeros(16, SPEC.hidden_size), empty, encoded.rows[0]).sum().backward()
    assert not any(w.grad.any() for w in weights.values() if w.grad is not None)
