"""Tables of formats beside each other: what is counted, and that every column drafts for the same body."""

from dataclasses import replace

from onebox.checkpoint.recipe import TargetFormat
from onebox.engine.api import AcceptanceCounts
from recipes.pocket.evaluation.tasks import TaskResult
from recipes.pocket.formats import HEADS, acceptance_table


def test_heads_differ_in_the_head_alone():
    assert {replace(recipe, mtp=TargetFormat.KEEP) for recipe in HEADS.values()} == {HEADS["bf16"]}
    assert len({recipe.mtp for recipe in HEADS.values()}) == len(HEADS)


def test_all_workloads_are_one_row_each_and_added_up():
    def tasks(*accepted: tuple[int, int]) -> list[TaskResult]:
        counts = (AcceptanceCounts(10, 20, sum(pair), pair) for pair in accepted)
        return [TaskResult(name, 3, {}, drafts) for name, drafts in zip(("chat", "code"), counts, strict=True)]

    table = list(acceptance_table({"bf16": tasks((9, 9), (10, 5)), "int4": tasks((8, 4), (10, 5))}))
    assert table[0] == "| 1st / 2nd draft accepted | bf16 | int4 |"
    assert table[2:] == [
        "| chat (3) | 90.0% / 100.0% | 80.0% / 50.0% |",
        "| code (3) | 100.0% / 50.0% | 100.0% / 50.0% |",
        "| all | 95.0% / 73.7% | 90.0% / 50.0% |",
    ]
