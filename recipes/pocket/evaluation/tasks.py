"""Held-out examples answered by the engine: scores of the answers, and acceptance of the drafts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import onebox
from onebox.engine.api import AcceptanceCounts, SamplingParams
from onebox.text.chat import ChatTemplate
from recipes.pocket.evaluation.predictions import HeldOutPassage
from recipes.pocket.synthetic.example import Example, score
from recipes.pocket.synthetic.recall import recall
from recipes.pocket.synthetic.workloads import HELD_OUT_SEED, MEASURED, prompt_text

__all__ = ["TaskResult", "continue_text", "recall_task", "summary", "workload_task"]

_CHARACTERS_PER_TOKEN = 3.0
_DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class TaskResult:
    """Mean scores of `num` answers, each from 0 to 1, and the draft counts of all answers."""

    name: str
    num: int
    scores: dict[str, float] = field(default_factory=dict)
    drafts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    mean_prompt_tokens: float = 0.0

    def acceptance(self, position: int) -> float | None:
        """Acceptance rate of the draft at `position` (from 0), given that all drafts before it were accepted."""
        accepted = self.drafts.accepted_by_position
        num_before = (self.drafts.num_steps, *accepted)
        offered = num_before[position] if position < len(num_before) else 0
        if not offered:
            return None
        return accepted[position] / offered if position < len(accepted) else 0.0

    @property
    def scores_text(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value:.1%}" for name, value in self.scores.items())

    @property
    def acceptance_text(self) -> str:
        """Acceptance of the first and the second draft, as cells of a table."""
        shares = (self.acceptance(position) for position in range(2))
        return " | ".join("-" if share is None else f"{share:.1%}" for share in shares)


def workload_task(llm: "onebox.LLM", directory: Path, name: str, count: int, max_tokens: int) -> TaskResult:
    """The answers to `count` held-out examples of a workload."""
    examples = [MEASURED[name](Random(HELD_OUT_SEED + number)) for number in range(count)]  # noqa: S311
    return _answered(llm, directory, name, examples, max_tokens)


def recall_task(llm: "onebox.LLM", directory: Path, tokens: int, count: int, max_tokens: int) -> TaskResult:
    """`count` keys hidden in about `tokens` tokens, at depths from the beginning to the end in rotation."""
    template = ChatTemplate.load(directory)

    def example(number: int) -> Example:
        depth, seed = _DEPTHS[number % len(_DEPTHS)], HELD_OUT_SEED + number
        characters = tokens * _CHARACTERS_PER_TOKEN
        # Languages differ in characters per token, so the length is corrected by that of a first try.
        tried = llm.tokenizer.encode(prompt_text(recall(Random(seed), int(characters), depth), template))  # noqa: S311
        return recall(Random(seed), int(characters * tokens / len(tried)), depth)  # noqa: S311

    return _answered(llm, directory, f"key at {tokens:,}", [example(number) for number in range(count)], max_tokens)


def continue_text(llm: "onebox.LLM", name: str, passages: Sequence[HeldOutPassage], max_tokens: int) -> TaskResult:
    """Continuations of held-out texts. There is no right answer; only the drafts are counted."""
    prompts = [passage.token_ids[:128] for passage in passages]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    answers = llm.generate(prompts, params)
    drafts = sum((answer.counts.drafts for answer in answers if answer.counts), AcceptanceCounts())
    return TaskResult(name, len(prompts), {}, drafts, sum(map(len, prompts)) / len(prompts))


def _answered(
    llm: "onebox.LLM", directory: Path, name: str, examples: Sequence[Example], max_tokens: int
) -> TaskResult:
    template = ChatTemplate.load(directory)
    prompts = [prompt_text(example, template) for example in examples]
    answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    return summary(name, [score(e, answer.text) for e, answer in zip(examples, answers, strict=True)], answers)


def summary(name: str, scores: Sequence[Mapping[str, float]], answers: Sequence["onebox.Completion"]) -> TaskResult:
    """The means of each answer's scores, over those that have them."""
    names = sorted({key for each in scores for key in each})
    means = {
        key: sum(each[key] for each in scores if key in each) / sum(key in each for each in scores) for key in names
    }
    drafts = sum((answer.counts.drafts for answer in answers if answer.counts), AcceptanceCounts())
    return TaskResult(name, len(answers), means, drafts, sum(len(a.prompt_token_ids) for a in answers) / len(answers))
