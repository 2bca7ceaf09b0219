"""The table of what a draft vocabulary costs: each workload, and all together."""

from onebox.engine.api import AcceptanceCounts
from recipes.pocket import draft_vocab
from recipes.pocket.evaluation.tasks import TaskResult
from recipes.pocket.synthetic.workloads import MEASURED


def test_the_table_has_each_workload_and_the_sum_of_all():
    results = {
        name: TaskResult(name, 3, {}, AcceptanceCounts(10, 20, 5 + place, (5 + place,)))
        for place, name in enumerate(MEASURED)
    }
    *rows, total = draft_vocab._table({"all tokens": results, "listed": results})
    assert len(rows) == 2 + len(MEASURED)
    accepted = sum(5 + place for place in range(len(MEASURED))) / (10 * len(MEASURED))
    assert total.startswith(f"| all ({3 * len(MEASURED)}) | {accepted:.1%} / ")
