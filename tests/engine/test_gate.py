"""The same tokens and log-probabilities, bit for bit, whatever else the engine does: the gate and its own tests.

`make test` runs a sample in which every two values of two dimensions meet; `-m gate` runs the whole product with all
cases, on the GPU if there is one (hours); `-m gpu` runs the sample on CUDA graphs.
"""

import re
import threading
from itertools import combinations

import pytest
import torch

from onebox.engine.request import SamplingParams
from onebox.engine.step import StepOutput
from onebox.spec.states import StateDtype
from tests.engine.gate import (
    DIMENSIONS,
    ON_DISK,
    STATES,
    Gate,
    Variant,
    all_variants,
    check_nothing_leaks,
    covering_sample,
    difference,
    read,
)
from tests.engine.gate_pictures import picture_cases
from tests.engine.gate_prompts import HAS_GRAMMARS, Case, all_cases, hands, text
from tests.engine.scripted import DeferredRun

HAND = 4
"""Cases that a variant of the sample is asked."""
VARIANTS = covering_sample()
CASES = all_cases() + picture_cases()
SAMPLE = [*zip(VARIANTS, hands(CASES, [variant.kv for variant in VARIANTS], HAND), strict=True)]
GRAMMARS = "" if HAS_GRAMMARS else "-without grammars"
SAMPLE_NAMES = [f"{variant}{GRAMMARS}" for variant in VARIANTS]


def cases_named(*names):
    return [next(case for case in CASES if case.name == name) for name in names]


def check(gate, variant, cases):
    """The gate itself. What it is about must also have happened."""
    report = gate.run(variant, cases)
    assert not report.differences, "\n".join(report.differences)
    if variant.cache == "warm" and variant.pages == "ample":
        assert report.stats.prefix.hit_tokens > 0
    if variant.cache == "evicted":
        assert report.stats.prefix.evicted > 0
    disk = report.stats.disk
    assert (disk is not None) == (variant.cache in ON_DISK)
    if disk and variant.pages == "ample":
        # A prompt may have been computed again, and be in memory, before the next one needs what is on disk.
        assert disk.num_hits + disk.num_damaged + report.stats.prefix.hit_tokens > 0
    drafts = report.stats.totals.drafts
    if variant.drafts.startswith(("mtp", "listed", "dflash")):
        assert drafts.num_drafted > 0
    if variant.drafts.startswith("listed"):
        assert report.stats.draft_vocab.num_renewals > 0
        assert 0 < report.stats.draft_vocab.num_listed < report.stats.draft_vocab.num_said
    if variant.drafts.startswith(("oracle", "mixed")):
        assert 0 < drafts.num_accepted < drafts.num_drafted
    return report


@pytest.mark.parametrize(("variant", "cases"), SAMPLE, ids=SAMPLE_NAMES)
def test_answers_are_the_same_bits(gate, variant, cases):
    check(gate, variant, cases)


@pytest.mark.gate
@pytest.mark.parametrize("variant", all_variants(), ids=str)
def test_answers_are_the_same_bits_in_the_whole_product(gate, variant):
    check(gate, variant, CASES)


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "cases"), SAMPLE, ids=SAMPLE_NAMES)
def test_answers_are_the_same_bits_on_a_gpu(gpu_gate, variant, cases):
    check(gpu_gate, variant, cases)


# That what may disturb does happen.


@pytest.mark.parametrize("drafts", ["mtp4", "oracle8"])
def test_who_is_sent_out_for_want_of_pages_goes_on_as_if_nothing_was(gate, drafts):
    sampling = [
        SamplingParams(temperature=i % 2, seed=1000 + i, max_tokens=30, logprobs=1, ignore_eos=True) for i in range(5)
    ]
    cases = [Case(f"growing {i}", "growing", text(40 + 2 * i, i), sampling[i]) for i in range(5)]
    report = check(gate, Variant("fp8", drafts=drafts, load="eight", pages="few"), cases)
    assert report.stats.totals.num_preempted > 0


def test_who_is_sent_out_for_one_of_higher_priority_goes_on_as_if_nothing_was(gate):
    cases = cases_named("length 63", "length 127", "prompt logprobs", "grammar: regex" if HAS_GRAMMARS else "length 64")
    report = check(gate, Variant("turboquant", "warm", "oracle4", "alone", "aborts", "64"), cases)
    assert report.stats.totals.num_preempted > 0


@pytest.mark.parametrize(
    "variant",
    [
        Variant("bf16", "disk", "mtp2", "two"),
        Variant("fp8", "restarted", "none", "eight", "aborts", "64"),
        Variant("turboquant", "damaged", "mtp1", "two", "calm", "512"),
    ],
    ids=str,
)
def test_answers_from_disk_are_the_same_bits_and_do_come_from_there(gate, variant):
    disk = check(gate, variant, cases_named("length 500", "base and 20", "turn 2")).stats.disk
    assert (disk.num_damaged if variant.cache == "damaged" else disk.num_hits) > 0


def test_a_drafter_that_knows_the_answer_is_believed_to_its_full_depth(gate):
    cases = [case for case in all_cases() if case.family == "lengths" and not case.is_long]
    variant = Variant("bf16", drafts="oracle8", load="eight")
    drafts = check(gate, variant, cases).stats.totals.drafts
    assert len(drafts.accepted_by_position) == 8
    assert all(drafts.accepted_by_position)


def test_penalties_bans_and_grammars_hold_within_a_row_of_drafts(gate):
    rules = "grammar", "presence_penalty", "min_tokens"
    cases = [case for case in all_cases() if any(getattr(case.sampling, rule) for rule in rules) and not case.is_long]
    variant = Variant("bf16", drafts="oracle8", load="eight")
    check(gate, variant, cases)


def test_requests_of_two_threads_are_answered_alike(gate):
    """Arrivals as the clock has them, at an engine that nobody steps."""
    cases = cases_named("length 5", "length 129", "base and 1", "base and 20", "turn 1", "turn 2")
    variant = Variant("bf16", "cold", "mtp2", "eight", "calm", "64")
    expected, answers = gate.reference("bf16", cases), {}
    engine, _ = gate.open(variant, cases)
    with engine:

        def ask(client: int) -> None:
            handles = [engine.submit(case.request(f"{case.name} {client}")) for case in cases[:: 1 - 2 * client]]
            answers.update({handle.request_id: read(handle) for handle in handles})

        threads = [threading.Thread(target=ask, args=(client,)) for client in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    check_nothing_leaks(engine)
    assert len(answers) == 2 * len(cases)
    assert not [name for name, answer in answers.items() if difference(expected[name[:-2]], answer)]


@pytest.fixture
def two_cpu_threads():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


def test_the_number_of_cpu_threads_does_not_matter(gate, request):
    cases = cases_named("length 500", "base and 20", "turn 2")
    gate.reference("bf16", cases)
    request.getfixturevalue("two_cpu_threads")
    check(gate, Variant("bf16", drafts="mtp2", load="two"), cases)


def test_kv_formats_answer_each_in_their_own_way(gate):
    """Else the gate would compare one format three times."""
    cases = cases_named("length 500")
    answers = [gate.reference(kv, cases)["length 500"] for kv in DIMENSIONS["kv"]]
    assert all(difference(one, other) for one, other in combinations(answers, 2))


def test_dtypes_of_states_answer_each_in_their_own_way(gate, monkeypatch):
    cases, answers = cases_named("length 500"), []
    for state_dtype in StateDtype:
        monkeypatch.setitem(STATES, "bf16", state_dtype)
        answers.append(Gate(gate._model).reference("bf16", cases)["length 500"])
    assert all(difference(one, other) for one, other in combinations(answers, 2))


# That the gate covers what it says, and can fail.


def test_the_prompts_are_as_many_and_as_long_as_promised():
    lengths = [len(case.prompt) for case in CASES]
    assert len(lengths) >= 40
    assert (min(lengths), max(lengths)) == (1, 4000)
    assert len({case.sampling.seed for case in CASES}) == len({case.name for case in CASES}) == len(lengths)


def test_the_sample_covers_every_two_values_and_deals_every_case():
    assert {*STATES} == {*DIMENSIONS["kv"]}
    assert {*STATES.values()} == {*StateDtype}
    for first, second in combinations(DIMENSIONS, 2):
        met = {(getattr(variant, first), getattr(variant, second)) for variant, _ in SAMPLE}
        assert len(met) == len(DIMENSIONS[first]) * len(DIMENSIONS[second])
    assert {case.name for _, hand in SAMPLE for case in hand} == {case.name for case in CASES}


def test_the_whole_product_has_every_combination_once():
    points = {tuple(vars(variant).values())[:-1] for variant in all_variants()}
    assert len(points) == len(all_variants()) == 3 * 6 * 12 * 4 * 2 * 3


class BrokenRunner:
    """A runner whose results are changed by `spoil(step, plan, result)`."""

    def __init__(self, runner, spoil):
        self._runner, self._spoil, self._num_steps = runner, spoil, 0

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    def start(self, plan):
        return DeferredRun(lambda: self._run(plan))

    def _run(self, plan):
        output = self._runner.start(plan).finish()
        self._num_steps += 1
        return StepOutput(output.chunks, tuple(self._spoil(self._num_steps, plan, rows) for rows in output.rows))


def other_token_in_company(step, plan, result):
    if len(plan.rows) < 2:
        return result
    return result._replace(token_ids=(*result.token_ids[:-1], result.token_ids[-1] ^ 1))


def noise_in_one_step(step, plan, result):
    """The last bit of a log-probability."""
    if step != 3:
        return result
    first = result.logprobs[0]
    spoilt = first._replace(logprob=float(torch.tensor(first.logprob).nextafter(torch.tensor(0.0))))
    return result._replace(logprobs=(spoilt, *result.logprobs[1:]))


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [(other_token_in_company, r"length 5: token_ids\[\d+\] is"), (noise_in_one_step, r"logprobs\[\d\] is")],
)
def test_the_gate_names_the_case_and_the_place_of_a_wrong_answer(gate, spoil, expected):
    variant, cases = Variant("bf16", load="two"), cases_named("length 5", "length 40")
    report = gate.run(variant, cases, wrap=lambda runner: BrokenRunner(runner, spoil))
    assert re.search(expected, "\n".join(report.differences))
    assert all(difference.startswith(f"{variant}, length ") for difference in report.differences)


def test_the_gate_sees_a_picture_taken_for_another(gate, monkeypatch):
    monkeypatch.setattr("onebox.engine.images.content_tokens", lambda *given: given[2])
    cases = cases_named("a picture", "another picture in the same place")
    assert gate.run(Variant("bf16", "warm"), cases).differences


@pytest.mark.parametrize(
    "lose", [lambda scheduler: scheduler._pool.take(1), lambda scheduler: scheduler._free_slots.pop()]
)
def test_the_gate_sees_a_page_or_a_slot_that_nobody_gave_back(gate, lose):
    variant, cases = Variant("bf16"), cases_named("length 5")
    engine, _ = gate.open(variant, cases)
    with engine:
        read(engine.submit(cases[0].request("a request")))
    lose(engine._scheduler)
    with pytest.raises(RuntimeError, match=r"lost|holders"):
        check_nothing_leaks(engine)
