"""The table of what a draft vocabulary costs: its lists and its totals."""

from collections import Counter

from onebox.engine.api import AcceptanceCounts
from recipes.pocket import draft_vocab
from recipes.pocket.evaluation.tasks import TaskResult
from recipes.pocket.synthetic.workloads import MEASURED


def test_the_list_for_a_workload_is_counted_on_the_others():
    said = {"code": Counter({7000: 9}), "chat": Counter({6000: 5, 6001: 1})}
    listed = draft_vocab._listed(said, "code", (8190, 8191), 8192)
    assert listed[:5] == [8190, 8191, 6000, 6001, 0]
    assert len(listed) == 1344
    assert 7000 not in listed


def test_the_table_has_each_workload_and_the_sum_of_all():
    results = {
        name: TaskResult(name, 3, {}, AcceptanceCounts(10, 20, 5 + place, (5 + place,)))
        for place, name in enumerate(MEASURED)
    }
    *rows, total = draft_vocab._table({"all tokens": results, "listed": results})
    assert len(rows) == 2 + len(MEASURED)
    accepted = sum(5 + place for place in range(len(MEASURED))) / (10 * len(MEASURED))
    assert total.startswith(f"| all ({3 * len(MEASURED)}) | {accepted:.1%} / ")
