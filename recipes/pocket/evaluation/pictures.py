"""Questions about pictures that nothing was trained on, answered by the engine: held-out seeds, fonts and documents."""

from pathlib import Path
from random import Random

import onebox
from onebox.engine.api import SamplingParams
from onebox.text.chat import ChatTemplate
from recipes.pocket.evaluation.tasks import TaskResult, summary
from recipes.pocket.pictures.fonts import FontShelf
from recipes.pocket.pictures.workloads import PICTURES, PictureSource, SeenExample
from recipes.pocket.synthetic.example import score
from recipes.pocket.synthetic.workloads import HELD_OUT_SEED, prompt_text

__all__ = ["characters_right", "picture_task"]


def picture_task(llm: "onebox.LLM", directory: Path, fonts: Path, name: str, count: int, max_tokens: int) -> TaskResult:
    """The answers to `count` questions of a kind; texts also have the share of characters that are right."""
    source = PictureSource(FontShelf(fonts), held_out=True)
    template = ChatTemplate.load(directory)
    seen = [PICTURES[name](Random(HELD_OUT_SEED + number), source) for number in range(count)]  # noqa: S311
    prompts = [
        {"prompt": prompt_text(each.example, template), "multi_modal_data": {"image": each.drawing.image()}}
        for each in seen
    ]
    answers = llm.generate(prompts, SamplingParams(max_tokens=max_tokens, temperature=0))
    scores = [_scored(each, answer.text) for each, answer in zip(seen, answers, strict=True)]
    return summary(f"picture: {name}", scores, answers)


def _scored(seen: SeenExample, answer: str) -> dict[str, float]:
    found = score(seen.example, answer)
    if seen.example.check["kind"] != "text":
        return {"exact": found["exact"], "fields": found["fields"]}
    content = answer.rpartition("</think>")[2].removesuffix("<|im_end|>").strip()
    return {"exact": found["exact"], "characters": characters_right(content, seen.example.check["values"][0])}


def characters_right(found: str, expected: str) -> float:
    """1 minus the edits from one to the other, over the characters expected; at least 0."""
    costs = list(range(len(expected) + 1))
    for row, character in enumerate(found, 1):
        before, costs[0] = costs[0], row
        for place, wanted in enumerate(expected, 1):
            before, costs[place] = (
                costs[place],
                min(costs[place] + 1, costs[place - 1] + 1, before + (character != wanted)),
            )
    return max(0.0, 1 - costs[-1] / max(1, len(expected)))
