"""Sampling under speculation follows the target distribution: chi-square tests of what engines draw over seeds.

Most of it on a Markov chain of 16 tokens behind the real engine, runner, sampler and drafting: the chance of each token
after each other one is known, so every step of every answer counts. What is left after top_k and the like is said by
transformers. Then the tiny model itself, whose logits transformers computes too. Seeds are fixed, so a test passes or
fails the same way every time; the bounds are those that chance exceeds once in a thousand runs.
"""

import math
from collections import Counter
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import one_hot
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from onebox.engine.api import Engine, EngineConfig, SpeculationConfig, SpeculationMethod
from onebox.engine.draft.speculate import SequenceDrafts
from onebox.engine.request import Request, SamplingParams
from onebox.engine.runner import ModelRunner
from onebox.model.load import load_model
from onebox.model.random import TINY, random_weights
from onebox.spec.model import spec_from_config
from tests.engine.fake import tokens_of
from tests.engine.tiny import tiny_engine
from tests.model.oracle import transformers_model

VOCAB_SIZE = 16
NUM_ANSWERS = 64
NUM_TOKENS = 80
WAYS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "all limits": {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.1},
    "bias": {"logit_bias": ((3, 2.0), (4, -100.0))},
}


class MarkovModel:
    """As the runner sees a model. A hidden state is the token itself; the head mixes it with others."""

    def __init__(self):
        random = torch.Generator().manual_seed(5)
        self.spec = SimpleNamespace(vocab_size=VOCAB_SIZE)
        self.device = torch.device("cpu")
        self.table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=random)
        noise = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=random)
        self.mtp = SimpleNamespace(mixes=torch.eye(VOCAB_SIZE) * 0.7 + noise * 0.1)

    def decode(self, batch, _memory):
        return one_hot(batch.token_ids, VOCAB_SIZE).float()

    def decode_tapped(self, batch, memory):
        return self.decode(batch, memory), None

    prefill_tapped = decode_tapped

    def start_logits(self, hidden):
        return hidden @ self.table

    def complete_logits(self, hidden, logits):
        """They are complete from the start."""

    def complete_candidates(self, hidden, logits, sampled):
        """So are those that are sampled from."""

    def draft_logits(self, hidden):
        return self.start_logits(hidden), None

    def draft(self, batch, _hidden, _pages):
        return one_hot(batch.token_ids, VOCAB_SIZE).float() @ self.mtp.mixes

    def write_draft_kv(self, batch, hidden, pages):
        """It keeps no keys and values."""

    prefill_draft_kv = write_draft_kv


@pytest.fixture(scope="module")
def markov():
    return MarkovModel()


def draw(markov, way, method="none", max_drafts=0, acceptance=()):
    """((token, token after it) -> how often, what the engine tells of its drafts)."""
    speculation = SpeculationConfig(SpeculationMethod(method), max_drafts, synthetic_acceptance=acceptance)
    config = EngineConfig(200, 100, max_num_seqs=32, max_num_waiting=NUM_ANSWERS, speculation=speculation)
    hidden = torch.zeros(32, VOCAB_SIZE)
    memory = SimpleNamespace(hidden=hidden, mtp=object(), drafts=None, kept_rows=0, clear=lambda _: None)
    sampling = SamplingParams(seed=100, max_tokens=NUM_TOKENS, **way)
    with Engine(ModelRunner(markov, memory, config), config) as engine:
        handles = engine.submit_copies(Request("a", (1, 2), sampling), NUM_ANSWERS)
        answers = [(2, *tokens_of(handle)) for handle in handles]
        drafts = engine.stats().totals.drafts
    return Counter(pair for answer in answers for pair in pairwise(answer)), drafts


def shares(logits, way):
    """What the sampling settings leave of logits [n, V], by transformers: float64 [n, V]."""
    sampling = SamplingParams(**way)
    for token_id, value in sampling.logit_bias:
        logits = logits.index_add(1, torch.tensor([token_id]), torch.full((len(logits), 1), value))
    warpers = [TemperatureLogitsWarper(sampling.temperature)]
    warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    warpers += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    for warper in warpers:
        logits = warper(None, logits)
    return logits.double().softmax(-1)


def excess(counts, chances):
    """Pearson's statistic over its bound at p = 0.001: above 1 the counts do not follow the chances.

    Counts are of (row, outcome) and chances of the outcomes in each row: {row: {outcome: chance}}.
    """
    statistic = freedom = 0
    for row, row_chances in chances.items():
        seen = {outcome: count for (place, outcome), count in counts.items() if place == row}
        assert all(row_chances[outcome] > 0 for outcome in seen), "something impossible was drawn"
        cells = _cells(seen, row_chances)
        statistic += sum((count - wanted) ** 2 / wanted for count, wanted in cells)
        freedom += max(0, len(cells) - 1)
    return statistic / _bound(freedom)


def _cells(seen, chances):
    """(seen, expected) of each outcome; those too rare for the test's approximation are one together."""
    total = sum(seen.values())
    cells = [(seen.get(outcome, 0), chance * total) for outcome, chance in chances.items()]
    large, small = [cell for cell in cells if cell[1] >= 5], [cell for cell in cells if cell[1] < 5]
    rest = (sum(count for count, _ in small), sum(wanted for _, wanted in small))
    return [*large, rest] if rest[1] > 0 else large


def _bound(freedom):
    """The 0.999 quantile of chi-square, by Wilson and Hilferty."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 3.0902 * math.sqrt(part)) ** 3


def markov_excess(counts, markov, way):
    rows = shares(markov.table, way).tolist()
    return excess(counts, {place: dict(enumerate(row)) for place, row in enumerate(rows)})


def drafting(monkeypatch, token_id):
    """Makes every draft this token."""
    monkeypatch.setattr(SequenceDrafts, "propose", lambda self, room: (token_id,) * min(room, self._config.max_drafts))


@pytest.mark.parametrize(
    ("method", "max_drafts", "way"),
    [*(("mtp", 3, way) for way in WAYS), *product(["ngram"], [2], ["plain", "top_k", "all limits"])],
)
def test_draws_follow_the_target_whoever_drafts(markov, method, max_drafts, way):
    counts, drafts = draw(markov, WAYS[way], method, max_drafts)
    assert sum(counts.values()) == NUM_ANSWERS * NUM_TOKENS
    assert drafts.num_accepted > 100
    assert markov_excess(counts, markov, WAYS[way]) < 1


@pytest.mark.parametrize("way", ["plain", "all limits"])
@pytest.mark.parametrize("token_id", [3, 9])
def test_draws_follow_the_target_beside_drafts_that_always_say_the_same(markov, monkeypatch, token_id, way):
    drafting(monkeypatch, token_id)
    counts, drafts = draw(markov, WAYS[way], "ngram", 3)
    assert drafts.num_accepted > 50
    assert markov_excess(counts, markov, WAYS[way]) < 1


def test_drafts_change_no_draw_at_all(markov):
    plain, _ = draw(markov, {})
    for method in ("mtp", "ngram", "auto"):
        assert draw(markov, {}, method, 4)[0] == plain


def test_drafts_of_a_head_that_is_mostly_right_are_mostly_taken(markov):
    _, drafts = draw(markov, {}, "mtp", 1)
    assert drafts.num_accepted > drafts.num_drafted / 2


def test_these_tests_notice_drafts_that_are_taken_too_often(markov, monkeypatch):
    drafting(monkeypatch, 3)
    counts, _ = draw(markov, {}, "ngram", 2, acceptance=(0.15,))
    assert markov_excess(counts, markov, {}) > 1


def test_these_tests_notice_another_temperature(markov):
    counts, _ = draw(markov, {"temperature": 0.8})
    assert markov_excess(counts, markov, {}) > 1


# The tiny model, left four tokens by a bias; answers of three tokens are counted, 64 outcomes.

BIAS = {17: 100.0, 40: 99.4, 203: 99.0, 311: 98.2}
# All that may follow a token follows it somewhere, so looking back always finds something.
PROMPT = (17, 40, 203, 311, 17, 17, 203, 40, 40, 311, 203, 203, 17, 311, 311, 40, 17)
NUM_DRAWS = 400


def test_draws_of_the_tiny_model_follow_the_logits_of_transformers(checkpoint):
    model = load_model(checkpoint, torch.device("cpu"), torch.float32)
    sampling = SamplingParams(seed=1, max_tokens=3, ignore_eos=True, logit_bias=tuple(BIAS.items()))
    with tiny_engine(model, "ngram", 2, max_num_seqs=32, num_checkpoints=0) as engine:
        handles = engine.submit_copies(Request("a", PROMPT, sampling), NUM_DRAWS)
        answers = [tuple(tokens_of(handle)) for handle in handles]
        assert engine.stats().totals.drafts.num_accepted > 50
    counts = Counter(((), answer) for answer in answers)
    assert excess(counts, {(): chances_of_answers()}) < 1


def chances_of_answers():
    """Answer of three tokens -> its probability."""
    oracle = transformers_model(TINY, random_weights(spec_from_config(TINY)))
    chances = {(): 1.0}
    for length in range(3):
        answers = list(product(BIAS, repeat=length))
        with torch.no_grad():
            logits = oracle(torch.tensor([(*PROMPT, *answer) for answer in answers])).logits[:, -1]
        following = dict(zip(answers, shares(logits, {"logit_bias": tuple(BIAS.items())}), strict=True))
        chances = {
            (*answer, token_id): chances[answer] * float(following[answer][token_id])
            for answer, token_id in product(answers, BIAS)
        }
    return chances
