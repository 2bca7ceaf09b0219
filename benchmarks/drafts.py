"""Drafters on the pocket model, one stream, by workload: each fixed choice beside `auto`, the two taking turns.

    python benchmarks/drafts.py [--drafter DIR] [--rounds 3] [--prompts 16] [--only json,copying] [--quiet]

Greedy answers to held-out prompts; both answer each prompt in turn, so that other work on the machine slows them alike.
Each has a process of its own, as a server's engine has, and no third engine is on the machine, as none is on a user's:
with five of them, in turns, each found the processor's caches full of others and lost by that what its step touches.
Every round has new processes: of two with the same work, one is up to 10% faster for as long as it lives.
Each answers twice and the second time counts. Drafts come from the whole vocabulary: a part of it would follow what
earlier runs have counted. For each workload, the medians over rounds of tokens a second:

    clock  as measured
    CPU    by the CPU time of the engine's one thread, host work included: the same without other programs' share
    table  every step counts as the median CPU time of all steps of its kind (rows, MTP passes, DFlash drafts) of the
           pair, whichever made it: what is left is what was chosen

A fixed variant loads its own drafter alone; auto loads all and keeps their contexts, which CPU and clock charge it
with and the table does not. Shares are auto's part of the fixed choice that it is least ahead of. All variants must
give the same answers. The last line is JSON.
"""

import argparse
import gc
import json
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from onebox import LLM, SamplingParams
from onebox.engine.draft.kinds import Drafter
from onebox.pocket.ready import pocket_checkpoint
from onebox.text.chat import ChatTemplate
from recipes.pocket.drafter.prompts import copying
from recipes.pocket.synthetic.workloads import HELD_OUT_SEED, MEASURED, prompt_text

Kind = tuple[int, int, int]
WORKLOADS = {
    "json": MEASURED["invoice"],
    "code": MEASURED["code"],
    "copying": copying,
    "prose": MEASURED["chat"],
    "thinking": MEASURED["arithmetic"],
}
FIXED: dict[str, dict[str, Any]] = {
    "plain": {"speculation": "none"},
    **{f"mtp {depth}": {"speculation": "mtp", "num_speculative_tokens": depth} for depth in (1, 2, 3, 4)},
    "ngram 4": {"speculation": "ngram", "num_speculative_tokens": 4},
    "ngram 15": {"speculation": "ngram", "num_speculative_tokens": 15},
}
BLOCK_DEPTHS = (3, 7, 15)


class Step(NamedTuple):
    kind: Kind
    seconds: float
    cpu_seconds: float


class Variant:
    """One engine in a process of its own, as a server has it."""

    def __init__(self, name: str, options: dict[str, Any], *, is_quiet: bool) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, options, is_quiet), daemon=True)
        self._process.start()

    def answer(self, prompt: str, num_tokens: int) -> tuple[list[int], list[Step]]:
        """The answer's tokens, and its steps after the first token."""
        self._connection.send((prompt, num_tokens))
        token_ids, steps = self._connection.recv()
        return token_ids, [Step(*step) for step in steps]

    def close(self) -> None:
        self._connection.send(None)
        self._process.join()


def _serve(connection: "Connection[Any, Any]", options: dict[str, Any], is_quiet: bool) -> None:
    """Answers prompts with an engine until it is sent None."""
    torch.set_num_threads(1)
    llm = LLM(pocket_checkpoint(), **options)
    steps = _record_steps(llm, is_quiet)
    gc.collect()
    gc.freeze()
    while (asked := connection.recv()) is not None:
        prompt, num_tokens = asked
        steps.clear()
        [answer] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=num_tokens))
        connection.send((answer.token_ids, [tuple(step) for step in steps]))
    llm.close()


def _record_steps(llm: LLM, is_quiet: bool) -> list[Step]:
    """The decode steps of the answer under way: a list that the engine's thread appends to."""
    scheduler: Any = llm.engine._scheduler
    observe, steps, since = scheduler.observe, list[Step](), 0.0

    def record(plan: Any, seconds: float, speculator: Any) -> None:
        nonlocal since
        cpu_seconds = time.thread_time() - since
        observe(plan, cpu_seconds if is_quiet else seconds, speculator)
        if plan.rows and not plan.chunks:
            num_rows = sum(len(rows.token_ids) for rows in plan.rows)
            steps.append(
                Step((num_rows, plan.depth_by(Drafter.MTP), plan.depth_by(Drafter.DFLASH)), seconds, cpu_seconds)
            )
        since = time.thread_time()

    scheduler.observe = record
    return steps


@dataclass
class Figures:
    """Of one variant on one workload: by round, tokens after the first, and steps."""

    tokens: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    steps: dict[int, list[Step]] = field(default_factory=lambda: defaultdict(list))

    def tokens_a_step(self) -> float:
        return sum(self.tokens.values()) / max(1, sum(map(len, self.steps.values())))

    def by_clock(self, number: int) -> float:
        return self.tokens[number] / sum(step.seconds for step in self.steps[number])

    def by_cpu(self, number: int) -> float:
        return self.tokens[number] / sum(step.cpu_seconds for step in self.steps[number])

    def by_table(self, number: int, table: dict[Kind, float]) -> float:
        return self.tokens[number] / sum(table[step.kind] for step in self.steps[number])

    def row(self, table: dict[Kind, float]) -> "Row":
        rounds = list(self.steps)
        clock, cpu = (statistics.median(map(of, rounds)) for of in (self.by_clock, self.by_cpu))
        return Row(self.tokens_a_step(), clock, cpu, statistics.median(self.by_table(each, table) for each in rounds))


class Row(NamedTuple):
    tokens_a_step: float
    clock: float
    cpu: float
    table: float


def prompts_of(workload: str, count: int, template: ChatTemplate) -> list[str]:
    return [prompt_text(WORKLOADS[workload](Random(HELD_OUT_SEED + number)), template) for number in range(count)]


class Measurement:
    """Figures of a pair by workload, over rounds."""

    def __init__(self, prompts: dict[str, list[str]], given: argparse.Namespace, known: dict[str, list[int]]) -> None:
        """`known` has the answers to prompts so far, and gets those of this pair."""
        self.figures = {workload: [Figures(), Figures()] for workload in prompts}
        self._prompts = prompts
        self._given = given
        self._known = known

    def run(self, pair: list[Variant], number: int) -> None:
        """Round `number`."""
        for workload, prompts in self._prompts.items():
            for repeat in range(-self._given.warm_up, 1):
                for place, prompt in enumerate(prompts):
                    order = list(zip(pair, self.figures[workload], strict=True))
                    for variant, figure in order if (place + repeat + number) % 2 else order[::-1]:
                        self._ask(variant, prompt)
                        token_ids, steps = self._ask(variant, prompt)
                        if repeat == 0 and len(token_ids) > 1:
                            figure.tokens[number] += len(token_ids) - 1
                            figure.steps[number] += steps

    def _ask(self, variant: Variant, prompt: str) -> tuple[list[int], list[Step]]:
        token_ids, steps = variant.answer(prompt, self._given.tokens)
        if self._known.setdefault(prompt, token_ids) != token_ids:
            raise SystemExit(f"{variant.name} gave another answer than one before to: {prompt}")
        return token_ids, steps


class Pair(NamedTuple):
    """A fixed choice and auto beside it."""

    fixed: Row
    auto: Row

    @classmethod
    def of(cls, figures: list[Figures]) -> "Pair":
        seen = defaultdict(list)
        for figure in figures:
            for steps in figure.steps.values():
                for step in steps:
                    seen[step.kind].append(step.cpu_seconds)
        table = {kind: statistics.median(times) for kind, times in seen.items()}
        return cls(*(figure.row(table) for figure in figures))

    def share(self, measure: str) -> float:
        """What auto makes of the fixed choice's tokens a second."""
        return float(getattr(self.auto, measure) / getattr(self.fixed, measure))


def report(workload: str, pairs: dict[str, Pair]) -> dict[str, Any]:
    best = min(pairs, key=lambda name: pairs[name].share("clock"))
    shares = {
        measure: round(min(pair.share(measure) for pair in pairs.values()), 3) for measure in ("clock", "cpu", "table")
    }
    print(f"\n{workload}: least ahead of {best}; auto's share: " + ", ".join(f"{n} {v}" for n, v in shares.items()))
    for name, pair in pairs.items():
        for label, row in ((name, pair.fixed), ("  auto", pair.auto)):
            speeds = "  ".join(f"{value:7.1f}" for value in row[1:])
            print(f"  {label:10} {row.tokens_a_step:6.2f} tokens a step; tok/s by clock, CPU, table: {speeds}")
    rows = {name: [[round(value, 2) for value in row] for row in pair] for name, pair in pairs.items()}
    return {"best": best, "shares": shares, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", type=Path, help="the directory of a DFlash drafter for the pocket model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=2, help="times that all prompts are answered before that counts")
    parser.add_argument("--prompts", type=int, default=16, help="of each workload: many of the answers are short")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most")
    parser.add_argument("--drafts", type=int, default=15, help="of auto, at most")
    parser.add_argument("--variants", default="", help='fixed ones, such as "mtp 4,dflash 15"; default: all')
    parser.add_argument(
        "--quiet", action="store_true", help="auto learns costs from CPU time, as if nothing else ran on the machine"
    )
    parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads, comma-separated")
    given = parser.parse_args()
    options = {**FIXED, "auto": {"speculation": "auto", "num_speculative_tokens": given.drafts}}
    if given.drafter:
        for depth in BLOCK_DEPTHS:
            block = {"speculation": "dflash", "num_speculative_tokens": depth, "draft_model": given.drafter}
            options[f"dflash {depth}"] = block
        options["auto"]["draft_model"] = given.drafter
    chosen = given.variants.split(",") if given.variants else list(options)
    options = {name: each for name, each in options.items() if name in (*chosen, "auto")}
    directory = pocket_checkpoint()
    common = {"max_num_seqs": 1, "max_model_len": 4096, "enable_prefix_caching": False, "draft_vocab": "full"}
    template, started = ChatTemplate.load(directory), time.monotonic()
    known = dict[str, list[int]]()
    prompts = {workload: prompts_of(workload, given.prompts, template) for workload in given.only.split(",")}
    pairs: dict[str, dict[str, Pair]] = {workload: {} for workload in prompts}
    auto = {**common, **options.pop("auto")}
    for name, own in options.items():
        measurement = Measurement(prompts, given, known)
        for number in range(given.rounds):
            kinds = ((name, {**common, **own}), ("auto", auto))
            pair = [Variant(each, kind, is_quiet=given.quiet) for each, kind in kinds]
            measurement.run(pair, number)
            for variant in pair:
                variant.close()
        for workload, figures in measurement.figures.items():
            pairs[workload][name] = Pair.of(figures)
    results = {workload: report(workload, found) for workload, found in pairs.items()}
    print(json.dumps({"workloads": results, "seconds": round(time.monotonic() - started)}))


if __name__ == "__main__":
    main()
