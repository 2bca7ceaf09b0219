"""Makes the pocket model: `python -m recipes.pocket` runs all stages.

Collects text and fonts (needs Debian's apt), trains on text (needs a GPU, about nine minutes) and on pictures (about 14
more), exports and evaluates. Finished stages are skipped; an interrupted training run resumes. The model is then in
WORK/model and the tables are in WORK/evaluation.md. To ship the model, copy the files of WORK/model over those of
onebox/pocket/model. The exit code is 1 if the model misses a requirement.
"""

import argparse
from pathlib import Path

from recipes.pocket.command import log_progress, run_command
from recipes.pocket.stages import STAGES, WorkDirectory, missed_claims, pocket_stages, run_stages, toy_stages

DEFAULT_MINUTES = 8.6
SEEING_MINUTES = 14.0
_TOY_MINUTES = 0.2


def main(arguments: list[str] | None = None) -> int:
    given = _parse(arguments)
    return run_command(lambda: _run_toy(given) if given.toy else _run(given))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".pocket"), help="working directory; default .pocket")
    parser.add_argument("--packages", type=Path, default=Path("build/pocket"), help="where Debian packages are kept")
    parser.add_argument(
        "--minutes", type=float, help=f"training time; default {DEFAULT_MINUTES}, with --toy {_TOY_MINUTES}"
    )
    parser.add_argument("--seeing-minutes", type=float, default=SEEING_MINUTES, help="time of the training on pictures")
    parser.add_argument("--start", type=Path, help="a text model to take, with its tokenizer, instead of training one")
    parser.add_argument("--from", dest="again_from", choices=STAGES, help="run this stage and all later ones again")
    parser.add_argument("--until", choices=STAGES, help="stop after this stage")
    parser.add_argument("--toy", action="store_true", help="a tiny model in WORK/toy: no GPU, no text, one minute")
    given = parser.parse_args(arguments)
    if (given.minutes is not None and given.minutes <= 0) or given.seeing_minutes <= 0:
        parser.error("--minutes and --seeing-minutes must be above 0")
    if given.start and (given.toy or "train" in (given.again_from, given.until)):
        parser.error("--start takes a trained text model: there is no stage train, and no toy")
    if given.again_from and given.until and STAGES.index(given.until) < STAGES.index(given.again_from):
        parser.error(f"--until {given.until} comes before --from {given.again_from}")
    return given


def _run_toy(given: argparse.Namespace) -> int:
    stages = toy_stages(WorkDirectory(given.work / "toy"), given.minutes or _TOY_MINUTES)
    run_stages(stages, given.again_from, given.until)
    return 0


def _run(given: argparse.Namespace) -> int:
    work = WorkDirectory(given.work)
    minutes = given.minutes or DEFAULT_MINUTES
    stages = pocket_stages(work, given.packages, minutes, given.seeing_minutes, given.start)
    run_stages(stages, given.again_from, given.until)
    misses = missed_claims(work) if work.evaluation.exists() else []
    for miss in misses:
        log_progress(f"missed: {miss}")
    return 1 if misses else 0


if __name__ == "__main__":
    raise SystemExit(main())
