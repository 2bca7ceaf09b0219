"""Stage 3, `python -m recipes.pocket.see --start MODEL --out DIR`: teaches a trained text model to see.

Starts from the weights of a checkpoint without a tower and trains a new tower with it, on questions about rendered
pictures, beside text, examples and keys hidden in up to 32,768 tokens. The tower learns first, then the text model too,
at a part of its rate. `--minutes` is the time of the whole run; where one command may not take that long,
`--limit-seconds` ends this process earlier and `--resume` continues the run. `--toy` trains a tiny model for some steps
on a CPU, to test the code.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from onebox.model.random_text import text_files
from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.spec.errors import MismatchError
from onebox.spec.model import ModelSpec, spec_from_config
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.command import run_command
from recipes.pocket.config import SEEING_TOY, pocket_config
from recipes.pocket.data.tokens import check_token_files
from recipes.pocket.pictures.fonts import CHARACTERS, FontShelf, write_characters
from recipes.pocket.pictures.workloads import PictureSource
from recipes.pocket.synthetic.filler import filler
from recipes.pocket.synthetic.workloads import SHARES
from recipes.pocket.training.checkpoint import read_progress, read_weights, save_run
from recipes.pocket.training.delta_rule import choose_delta_rule, plain_delta_rule
from recipes.pocket.training.feed import ExamplePool, TextRows, end_token, example_task, num_workers
from recipes.pocket.training.network import LayerFunctions, TrainingNetwork, Weights, draw_weights
from recipes.pocket.training.picture_feed import (
    LINE_ROWS,
    PAGE_ROWS,
    PictureDrawer,
    PictureFeed,
    PicturePool,
    PictureTask,
    RowShape,
)
from recipes.pocket.training.schedule import RunClock, ShareAt, later_share, picture_length, seeing_share
from recipes.pocket.training.trainer import BatchShape, Trainer, log_step, run_and_save, warm_up
from recipes.pocket.training.vision import PREFIX, TowerFunctions

__all__ = ["main", "see", "see_toy"]

_SHAPE = BatchShape(lengths=(1024, 8192, 32_768), length_at=picture_length)
_POOL_ROWS = 1024
_PICTURE_WORKERS = 0.85
"""Share of the worker processes that draw pictures; the others write examples."""
_TOY_SHAPE = BatchShape(tokens=1024, lengths=(256, 512, 1024), length_at=picture_length)
_TOY_ROWS = (RowShape(((112, 4),), {"short line": 1.0}), RowShape(((256, 2), (1024, 1)), {"scene": 1.0, "table": 1.0}))


def see(data: Path, fonts: Path, model: Path, out: Path, start: Path, clock: RunClock) -> None:
    """The real run. Forks the workers before the GPU is used."""
    check_token_files(data, model)
    config = pocket_config(first_special_token=end_token(model), sees=True)
    pools = [PicturePool(shape, _POOL_ROWS, min(_SHAPE.lengths)) for shape in (LINE_ROWS, PAGE_ROWS)]
    examples = ExamplePool(_SHAPE.pool_rows, token_shares=(3, 2, 2))
    feed = PictureFeed(TextRows(data), examples, pools, tuple(SHARES))
    drawers = max(1, round(num_workers() * _PICTURE_WORKERS))
    painters = PictureTask(fonts / "training", data, model, feed.kind_of).start(pools, drawers)
    examples.start(max(1, num_workers() - drawers), example_task(data, feed.kind_of, model))
    try:
        spec = spec_from_config(config)
        weights, share = _weights(spec, start)
        trainer = Trainer(_network(spec, data / "wheels", clock), weights, feed, _SHAPE, _device(), share)
        while not (examples.is_ready() and all(pool.is_ready() for pool in pools)):
            time.sleep(0.1)
        trainer = warm_up(trainer, clock)
        made = [pool.num_made for pool in pools]
        log_step(clock, f"ready: {trainer.shape.tokens} tokens a step, rows made {made} {examples.num_made()}")
        run_and_save(trainer, clock, partial(_save, out, config, clock, pools), examples)
    finally:
        for process in painters:
            process.terminate()
        examples.stop()


def see_toy(work: Path, out: Path, start: Path | None, clock: RunClock) -> None:
    """A tiny model on the CPU, with a font that comes with matplotlib and text that is generated."""
    model = work / "text"
    write_toy_data(model)
    spec = spec_from_config(SEEING_TOY)
    feed, pools, examples = toy_feed(model)
    draw = PictureDrawer(PictureSource(FontShelf(model / "fonts")), model, feed.kind_of)
    task = example_task(model, feed.kind_of, model)
    write = task.make_draw()
    for seed in range(3):
        for pool in pools:
            pool.make_row(draw, Random(seed))  # noqa: S311
        for length in _TOY_SHAPE.lengths:
            examples.make_row(length, write, Random(seed), task)  # noqa: S311
    network = TrainingNetwork(spec, plain_delta_rule)
    weights, share = _weights(spec, start)
    trainer = Trainer(network, weights, feed, _TOY_SHAPE, torch.device("cpu"), share)
    run_and_save(trainer, clock, partial(_save, out, SEEING_TOY, clock, pools))


def toy_feed(model: Path) -> tuple[PictureFeed, list[PicturePool], ExamplePool]:
    pools = [PicturePool(shape, 4, min(_TOY_SHAPE.lengths)) for shape in _TOY_ROWS]
    examples = ExamplePool(dict.fromkeys(_TOY_SHAPE.lengths, 4), token_shares=(1, 1, 1))
    return PictureFeed(TextRows(model), examples, pools, tuple(SHARES)), pools, examples


def write_toy_data(directory: Path) -> None:
    """The toy's tokenizer, a token file of generated text, and one font."""
    import matplotlib

    (directory / "fonts").mkdir(parents=True, exist_ok=True)
    (directory / "tokens").mkdir(exist_ok=True)
    for name, text in text_files().items():
        (directory / name).write_text(text, encoding="utf-8")
    passages = "\n\n".join(filler(Random(0), 2000))  # noqa: S311
    ids = np.array([*Tokenizer.load(directory).encode(passages), end_token(directory)], dtype=np.uint16)
    for name in ("generated", "heldout-generated"):
        ids.tofile(directory / "tokens" / f"{name}.bin")
    (directory / "index.json").write_text(json.dumps({"generated": {}}))
    font = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    (directory / "fonts" / "dejavu-sans-0.otf").write_bytes(font.read_bytes())
    write_characters(directory / "fonts", {"dejavu-sans-0.otf": CHARACTERS})


def _save(
    out: Path, config: Mapping[str, Any], clock: RunClock, pools: Sequence[PicturePool], weights: Weights
) -> None:
    save_run(out, config, clock, weights)
    log_step(clock, f"rows of pictures made: {[pool.num_made for pool in pools]}")


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _network(spec: ModelSpec, wheels: Path, clock: RunClock) -> TrainingNetwork:
    device = _device()
    torch.set_float32_matmul_precision("high")
    rule, reason = choose_delta_rule(spec, device, wheels)
    log_step(clock, f"{device}, torch {torch.__version__}; {reason}")
    if device.type != "cuda":
        return TrainingNetwork(spec, rule)
    return TrainingNetwork(spec, rule, LayerFunctions.compiled(), TowerFunctions.compiled())


def _weights(spec: ModelSpec, start: Path | None) -> tuple[Weights, ShareAt]:
    """Those of the checkpoint in `start`, the tower drawn if it has none; and the text model's share of the rate."""
    drawn = draw_weights(spec)
    if start is None:
        return drawn, seeing_share
    trained = read_weights(start)[1]
    for name, weight in trained.items():
        if name not in drawn or drawn[name].shape != weight.shape:
            raise MismatchError(f"{start} has a tensor {name} of another shape than the pocket model's.")
    return drawn | trained, later_share if any(name.startswith(PREFIX) for name in trained) else seeing_share


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket.see", description=__doc__)
    parser.add_argument("--minutes", type=float, default=14.0, help="time of the whole run")
    parser.add_argument("--limit-seconds", type=float, help="this process ends after so long; --resume continues")
    parser.add_argument("--out", type=Path, required=True, help="the directory of the checkpoint")
    parser.add_argument("--data", type=Path, default=Path(".pocket"), help="output of `prepare`; default .pocket")
    parser.add_argument("--fonts", type=Path, help="output of `pictures.fonts`; default DATA/fonts")
    parser.add_argument("--model", type=Path, default=MODEL_DIRECTORY, help="where the tokenizer is")
    parser.add_argument("--start", type=Path, help="the text model's checkpoint; default --model")
    parser.add_argument("--resume", action="store_true", help="continue the interrupted run in --out")
    parser.add_argument("--toy", action="store_true", help="a tiny model on the CPU")
    given = parser.parse_args(arguments)
    if given.minutes <= 0:
        parser.error("--minutes must be above 0")

    def run() -> int:
        done = read_progress(given.out) if given.resume else 0.0
        if done >= 1:
            return 0
        clock = RunClock(given.minutes, done, given.limit_seconds)
        given.out.mkdir(parents=True, exist_ok=True)
        if given.toy:
            see_toy(given.data, given.out, given.out if done else given.start, clock)
        else:
            start = given.out if done else given.start or given.model
            see(given.data, given.fonts or given.data / "fonts", given.model, given.out, start, clock)
        return 0

    return run_command(run)


if __name__ == "__main__":
    raise SystemExit(main())
