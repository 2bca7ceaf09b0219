"""What DeltaNet states of 16 bits cost in quality: the pocket model over 32,768 tokens, beside states of float32.

    python benchmarks/state_dtype.py [--phase decode|prefill] [--tokens 32768] [--passages 2] [--states-only]

A passage is held-out conversations of the pocket model's workloads, one after the other. Every variant is fed the same
tokens, in lockstep: as prompts in pieces of 512 (the state is rounded every 64 tokens), or as accepted tokens of decode
steps (rounded after each token; nine rows a step, which gives the bits of one). Each piece's predictions are compared
with those of the first variant, over the whole vocabulary. By position: errors that add up would show as a KL that
grows. For scale there are two variants that differ in other ways: an fp8 KV cache, and bfloat16 activations.

Prints a Markdown table: mean KL (nats a token) by position, perplexity, agreement of the most likely token, and the
largest magnitude in any state. The last line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp
from pathlib import Path
from random import Random

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from onebox.model.batch import Batch
from onebox.model.load import load_model
from onebox.model.memory import Memory, MemoryShape
from onebox.model.qwen3_5 import Qwen35
from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.spec.kv import PAGE_TOKENS, KVFormat
from onebox.spec.states import StateDtype
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.synthetic.workloads import HELD_OUT_SEED, MEASURED, render

PIECES = {"prefill": 512, "decode": 9}
BANDS = (0, 1024, 4096, 8192, 16384, 32768)


@dataclass
class Stream:
    """One variant in the middle of a passage, and its sums over all passages."""

    name: str
    model: Qwen35
    kv: str
    state_dtype: StateDtype
    num_tokens: int
    memory: Memory = field(init=False)
    num_pending: int = 0
    loss: float = 0.0
    largest: float = 0.0
    count: int = 0
    num_same: int = 0
    divergence: dict[int, float] = field(default_factory=lambda: dict.fromkeys(BANDS[1:], 0.0))

    def begin(self) -> None:
        num_pages = -(-self.num_tokens // PAGE_TOKENS) + 1
        shape = MemoryShape(
            KVFormat.parse(self.kv), num_pages, 1, 0, PIECES["decode"], with_mtp=False, state_dtype=self.state_dtype
        )
        self.memory = Memory.allocate(self.model.spec, shape, self.model.dtype, self.model.device)
        self.num_pending = 0

    def feed(self, phase: str, ids: tuple[int, ...], start: int) -> Tensor:
        """Log-probabilities [n, V] after each of these tokens, the first of which is token `start` of the passage."""
        batch = _batch(ids, start, self.num_pending, self.model.device)
        hidden = (self.model.decode if phase == "decode" else self.model.prefill)(batch, self.memory)
        self.num_pending = len(ids) if phase == "decode" else 0
        return self.model.logits(hidden)[:, : self.model.spec.vocab_size].log_softmax(-1)

    def score(self, found: Tensor, expected: Tensor, labels: Tensor, start: int) -> None:
        self.loss -= float(found.gather(1, labels[:, None]).sum())
        self.count += len(labels)
        self.num_same += int((found.argmax(-1) == expected.argmax(-1)).sum())
        band = next(end for end in BANDS[1:] if start < end)
        self.divergence[band] += float((expected.exp() * (expected - found)).sum())

    def end(self) -> None:
        self.largest = max(self.largest, float(self.memory.matrices.abs().max()))


def _batch(ids: tuple[int, ...], start: int, num_pending: int, device: torch.device) -> Batch:
    """Tokens of the one sequence, in slot 0 and in the pages from 1 on; page 0 is scratch."""
    places = torch.arange(start, start + len(ids), device=device)
    edges = torch.tensor([0, len(ids)], dtype=torch.int32, device=device)
    num_pages = -(-(start + len(ids)) // PAGE_TOKENS)
    return Batch(
        token_ids=torch.tensor(ids, device=device),
        positions=places.expand(3, -1).contiguous(),
        cu_rows=edges,
        slots=torch.zeros(1, dtype=torch.int32, device=device),
        num_accepted=torch.tensor([num_pending], dtype=torch.int32, device=device),
        seen=edges[1:] + start,
        page_table=torch.arange(1, num_pages + 1, dtype=torch.int32, device=device)[None],
        slot_mapping=places + PAGE_TOKENS,
        saves=torch.full((len(ids),), -1, dtype=torch.int32, device=device),
    )


def passages(count: int, num_tokens: int) -> Iterator[tuple[int, ...]]:
    """Held-out conversations of all workloads in random order, cut after `num_tokens`."""
    tokenizer, template = Tokenizer.load(MODEL_DIRECTORY), ChatTemplate.load(MODEL_DIRECTORY)
    for number in range(count):
        draw, ids = Random(HELD_OUT_SEED + number), list[int]()
        while len(ids) < num_tokens:
            ids += render(draw.choice([*MEASURED.values()])(draw), tokenizer, template)[0]
        yield tuple(ids[:num_tokens])


@torch.inference_mode()
def measure(streams: list[Stream], phase: str, passage: tuple[int, ...]) -> None:
    for stream in streams:
        stream.begin()
    edges = sorted({*range(0, len(passage) - 1, PIECES[phase]), *BANDS, len(passage) - 1})
    for start, end in pairwise(edge for edge in edges if edge < len(passage)):
        labels = torch.tensor(passage[start + 1 : end + 1])
        expected: Tensor | None = None
        for stream in streams:
            found = stream.feed(phase, passage[start:end], start).cpu().double()
            expected = found if expected is None else expected
            stream.score(found, expected, labels, start)
    for stream in streams:
        stream.end()


def report(streams: list[Stream], num_passages: int) -> None:
    ends = [(first, end) for first, end in pairwise(BANDS) if streams[0].divergence[end] or first < streams[0].count]
    print("| variant |", " | ".join(f"KL to {end:,}" for _, end in ends), "| perplexity | same top token | largest |")
    print("|---" * (len(ends) + 4) + "|")
    for stream in streams:
        tokens = {end: num_passages * (min(end, stream.num_tokens) - first) for first, end in ends}
        divergence = [f"{stream.divergence[end] / tokens[end]:.2e}" for _, end in ends]
        rest = f"{exp(stream.loss / stream.count):.5f} | {stream.num_same / stream.count:.3%} | {stream.largest:.1f}"
        print(f"| {stream.name} |", " | ".join(divergence), f"| {rest} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase", choices=[*PIECES], default="decode")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--passages", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--states-only", action="store_true", help="leave out the two variants that are for scale")
    given = parser.parse_args()
    device, dtype = torch.device(given.device), getattr(torch, given.dtype)
    model = load_model(MODEL_DIRECTORY, device, dtype)
    streams = [Stream(f"states {kind}", model, "bf16", kind, given.tokens) for kind in StateDtype]
    if not given.states_only:
        streams.append(Stream("KV fp8", model, "fp8", StateDtype.FLOAT32, given.tokens))
    if not given.states_only and dtype is torch.float32:
        narrow = load_model(MODEL_DIRECTORY, device, torch.bfloat16)
        streams.append(Stream("activations bfloat16", narrow, "bf16", StateDtype.FLOAT32, given.tokens))
    for passage in passages(given.passages, given.tokens):
        measure(streams, given.phase, passage)
        report(streams, streams[0].count // (given.tokens - 1))
    found = {
        stream.name: {
            "divergence": stream.divergence,
            "loss": stream.loss,
            "num_same": stream.num_same,
            "num_tokens": stream.count,
            "largest": stream.largest,
        }
        for stream in streams
    }
    print(json.dumps({"phase": given.phase, "dtype": given.dtype, "tokens": given.tokens, "variants": found}))


if __name__ == "__main__":
    main()
