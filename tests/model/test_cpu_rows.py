"""On a CPU a row's bits are its own: not how a prompt was split, how steps were grouped, or who else was there.

Hidden states and logits are compared with `torch.equal`; a second thread changes nothing. Decode
and prefill are two phases, each with bits of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from onebox.model.batch import Batch
from onebox.model.load import load_model
from onebox.model.memory import Memory, MemoryShape
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.kv import PAGE_TOKENS, KVFormat
from onebox.spec.states import StateDtype

CPU = torch.device("cpu")
PAGES_EACH = 4
SLOTS = 8
MOST_ROWS = 9
DTYPES = [torch.float32, torch.bfloat16]
FORMATS = {"bf16": StateDtype.FLOAT32, "fp8": StateDtype.BFLOAT16, "turboquant": StateDtype.FLOAT16}
"""KV formats, each with a dtype of DeltaNet states beside it."""


def tokens_of(seed: int, count: int) -> list[int]:
    return [(7 * i * i + 31 * seed + 3 * i + 1) % 480 for i in range(count)]


PROMPT = tokens_of(0, 200)
ANSWER = tokens_of(9, 20)
SHORT = 70
"""How much of the prompt comes before the answer; the answer begins in the second page."""


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16"])
def model(request, checkpoints) -> Qwen35:
    return load_model(checkpoints / "bf16-fused", CPU, request.param)


@contextmanager
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Sequence:
    """A sequence's place: its slot and its pages, which no other has."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        # Pages of a sequence neither neighbour each other nor come in order.
        self.pages = torch.tensor([(PAGES_EACH - 1 - i) * SLOTS + slot for i in range(PAGES_EACH)])
        self.num_tokens = 0
        self.keep = 0


class Company:
    """Sequences on one model and one memory, in batches that say who takes part and in which order."""

    def __init__(self, model: Qwen35, kv: str) -> None:
        num_pages = SLOTS * PAGES_EACH
        shape = MemoryShape(KVFormat.parse(kv), num_pages, SLOTS, 0, MOST_ROWS, with_mtp=True, state_dtype=FORMATS[kv])
        self.model = model
        self.memory = Memory.allocate(model.spec, shape, model.dtype, CPU)

    def prefill(self, *parts: tuple[Sequence, list[int]]) -> list[torch.Tensor]:
        """The hidden states of each part."""
        found = self._run(self.model.prefill, parts)
        for sequence, token_ids in parts:
            sequence.num_tokens += len(token_ids)
        return found

    def step(self, *parts: tuple[Sequence, list[int], int]) -> list[torch.Tensor]:
        """The hidden states of each part's rows, of which the number it says is accepted."""
        found = self._run(self.model.decode, [part[:2] for part in parts])
        for sequence, _, keep in parts:
            sequence.num_tokens += keep
            sequence.keep = keep
        return found

    def _run(self, run, parts) -> list[torch.Tensor]:
        counts = [len(token_ids) for _, token_ids in parts]
        sequences = [sequence for sequence, _ in parts]
        places = [torch.arange(s.num_tokens, s.num_tokens + n) for s, n in zip(sequences, counts, strict=True)]
        slot_mapping = [
            s.pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for s, p in zip(sequences, places, strict=True)
        ]
        cu_rows = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        slots = torch.tensor([s.slot for s in sequences], dtype=torch.int32)
        batch = Batch(
            token_ids=torch.tensor([token for _, token_ids in parts for token in token_ids]),
            positions=torch.cat(places).expand(3, -1),
            cu_rows=cu_rows,
            slots=slots,
            num_accepted=torch.tensor([s.keep for s in sequences], dtype=torch.int32),
            seen=torch.tensor([int(p[-1]) + 1 for p in places], dtype=torch.int32),
            page_table=torch.stack([s.pages for s in sequences]).to(torch.int32),
            slot_mapping=torch.cat(slot_mapping),
            saves=torch.full((sum(counts),), -1, dtype=torch.int32),
        )
        return list(run(batch, self.memory).split(counts))


def whole_prompt(model: Qwen35, kv: str) -> torch.Tensor:
    return Company(model, kv).prefill((Sequence(0), PROMPT))[0]


def one_by_one(model: Qwen35, kv: str) -> torch.Tensor:
    """The answer's rows, each a step of its own, nobody else there."""
    company, own = Company(model, kv), Sequence(0)
    company.prefill((own, PROMPT[:SHORT]))
    return torch.cat([company.step((own, [token], 1))[0] for token in ANSWER])


def split_prompt(model: Qwen35, kv: str, edges: tuple[int, ...]) -> torch.Tensor:
    company, own = Company(model, kv), Sequence(3)
    return torch.cat([company.prefill((own, PROMPT[first:end]))[0] for first, end in pairwise(edges)])


@pytest.mark.parametrize("kv", FORMATS)
@torch.inference_mode()
def test_a_split_prompt_has_the_bits_of_the_whole(model, kv):
    expected = whole_prompt(model, kv)
    for edges in [(0, 64, 200), (0, 128, 200), (0, 192, 200), (0, 64, 128, 192, 200)]:
        assert torch.equal(split_prompt(model, kv, edges), expected), edges


@pytest.mark.parametrize("kv", FORMATS)
@torch.inference_mode()
def test_a_prompt_among_others_has_the_bits_of_the_prompt_alone(model, kv):
    expected = whole_prompt(model, kv)
    for before, after in [((5,), ()), ((), (131,)), ((1, 77, 128), (3,)), ((130,), (9, 64))]:
        company, own = Company(model, kv), Sequence(5)
        first = [(Sequence(slot), tokens_of(slot, count)) for slot, count in enumerate(before)]
        last = [(Sequence(7 - slot), tokens_of(20 + slot, count)) for slot, count in enumerate(after)]
        head = company.prefill(*first, (own, PROMPT[:64]))[-1]
        tail = company.prefill((own, PROMPT[64:]), *last)[0]
        assert torch.equal(torch.cat([head, tail]), expected), (before, after)


GROUPINGS = {
    "two by two": [(2, 2)] * 10,
    "five by five": [(5, 5)] * 4,
    "nine rows": [(9, 9), (9, 9), (2, 2)],
    "drafts rejected": [(4, 1), (9, 3), (2, 0), (5, 5), (9, 8), (1, 1), (3, 2)],
}


def answer_in_steps(model, kv, grouping, num_others, position) -> torch.Tensor:
    """The answer's rows in steps of (rows, accepted), with other sequences of other lengths beside it."""
    company, own = Company(model, kv), Sequence(6)
    others = [Sequence(slot) for slot in range(SLOTS) if slot != own.slot][:num_others]
    company.prefill((own, PROMPT[:SHORT]))
    for index, other in enumerate(others):
        company.prefill((other, tokens_of(30 + index, 1 + 29 * index)))
    kept = []
    for number, (rows, accepted) in enumerate(grouping):
        done = own.num_tokens - SHORT
        drafted = ANSWER[done : done + accepted] + tokens_of(40 + number, rows - accepted)
        drafted[:1] = ANSWER[done : done + 1]
        beside = [(s, tokens_of(50 + i + number, 1 + (i + number) % 4), (i + number) % 2) for i, s in enumerate(others)]
        place = min(position, len(beside))
        found = company.step(*beside[:place], (own, drafted, accepted), *beside[place:])[place]
        kept.append(found[:accepted])
    return torch.cat(kept)


@pytest.mark.parametrize("kv", FORMATS)
@torch.inference_mode()
def test_grouping_a_step_and_rejecting_drafts_does_not_change_a_bit(model, kv):
    expected = one_by_one(model, kv)
    for name, grouping in GROUPINGS.items():
        assert torch.equal(answer_in_steps(model, kv, grouping, 0, 0), expected), name


@pytest.mark.parametrize("kv", FORMATS)
@torch.inference_mode()
def test_other_sequences_in_a_step_do_not_change_a_bit(model, kv):
    expected = one_by_one(model, kv)
    singles = [(1, 1)] * 20
    for grouping, num_others, position in [
        (singles, 1, 1),
        (GROUPINGS["drafts rejected"], 3, 2),
        (singles, 7, 0),
        (GROUPINGS["five by five"], 7, 4),
        (GROUPINGS["nine rows"], 7, 7),
    ]:
        assert torch.equal(answer_in_steps(model, kv, grouping, num_others, position), expected), (num_others, position)


@torch.inference_mode()
def test_a_second_thread_does_not_change_a_bit(model):
    prompt, answer = whole_prompt(model, "bf16"), one_by_one(model, "bf16")
    logits = model.logits(answer)
    with two_threads():
        assert torch.equal(split_prompt(model, "bf16", (0, 64, 200)), prompt)
        found = answer_in_steps(model, "bf16", GROUPINGS["nine rows"], 7, 3)
        assert torch.equal(found, answer)
        assert torch.equal(model.logits(found), logits)


@torch.inference_mode()
def test_a_rows_logits_do_not_depend_on_the_others(model):
    hidden = whole_prompt(model, "bf16")[:64]
    together = model.logits(hidden)
    for count in (1, 2, 3, 8, 9, 24):
        for first in (0, 5, 40):
            assert torch.equal(model.logits(hidden[first : first + count]), together[first : first + count])
