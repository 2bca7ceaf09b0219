"""The whole recipe of the pocket model by one command: `python -m recipes.pocket`.

Collects and tokenises the text (needs Debian's apt), trains (needs a GPU, about nine minutes), exports and evaluates. A
stage that is done is skipped, a training run that was stopped goes on. The model is then in WORK/model and its tables
in WORK/evaluation.md; to ship it, copy the files of WORK/model over those of onebox/pocket/model. Exits with 1 if the
model misses what it must reach.
"""

import argparse
from pathlib import Path

from recipes.pocket.command import run_command, say
from recipes.pocket.stages import STAGES, Work, missed, run_stages, stages, toy_stages

DEFAULT_MINUTES = 8.6
_TOY_MINUTES = 0.2


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".pocket"), help="where everything goes; default .pocket")
    parser.add_argument("--packages", type=Path, default=Path("build/pocket"), help="where packages are kept")
    parser.add_argument(
        "--minutes", type=float, help=f"training time; default {DEFAULT_MINUTES}, with --toy {_TOY_MINUTES}"
    )
    parser.add_argument("--from", dest="again_from", choices=STAGES, help="do this stage and all after it anew")
    parser.add_argument("--until", choices=STAGES, help="stop after this stage")
    parser.add_argument("--toy", action="store_true", help="a tiny model in WORK/toy: no GPU, no text, a minute")
    given = parser.parse_args(arguments)
    if given.minutes is not None and given.minutes <= 0:
        parser.error("--minutes must be above 0")
    if given.again_from and given.until and STAGES.index(given.until) < STAGES.index(given.again_from):
        parser.error(f"--until {given.until} comes before --from {given.again_from}")

    def run() -> int:
        if given.toy:
            run_stages(
                toy_stages(Work(given.work / "toy"), given.minutes or _TOY_MINUTES), given.again_from, given.until
            )
            return 0
        work = Work(given.work)
        run_stages(stages(work, given.packages, given.minutes or DEFAULT_MINUTES), given.again_from, given.until)
        misses = missed(work) if work.evaluation.exists() else []
        for miss in misses:
            say(f"missed: {miss}")
        return 1 if misses else 0

    return run_command(run)


if __name__ == "__main__":
    raise SystemExit(main())
