"""Decoding on a CPU: the whole engine beside transformers' generate, on the same small checkpoint, in one run.

    python benchmarks/cpu_engine.py [--model mid] [--dtype bfloat16] [--speculation none] [--rounds 5] [--tokens 64]

A small model of the family with random weights (tiny, mid), or the pocket model's own checkpoint with prompts of its
kind (pocket); prompts of 64 tokens, greedy; both sides in one dtype. Without speculation unless another is asked for:
`auto` is what the engine does by itself. Both take turns in every round, because other work may share the machine;
medians are compared. Each side runs with one and with two threads, and its better one counts. A stream's time is that
of all tokens after the first: prompts do not count. CPU seconds are printed beside it: with one thread they are the
same on a quiet machine, and on a busy one they are the fairer figure. The engine keeps keys and values in bfloat16, so
where two tokens are nearly as likely answers may differ. The last line is JSON.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5MoeForCausalLM
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

sys.path.insert(0, str(Path(__file__).parent.parent))

from onebox.engine.api import (
    Engine,
    EngineOptions,
    Failed,
    Request,
    SamplingParams,
    TokenInfo,
    Tokens,
    plan_engine,
    start_engine,
)
from onebox.model.random import TINY, random_weights
from onebox.spec.model import spec_from_config
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.synthetic.workloads import HELD_OUT_SEED, MEASURED, prompt_text

PROMPT = 64
MID = {
    **TINY["text_config"],
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 8192,
}
SIZES = {"tiny": {**TINY["text_config"]}, "mid": MID}
POCKET = Path(__file__).parent.parent / "onebox" / "pocket" / "model"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def write(directory: Path, config: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    weights = random_weights(spec_from_config(config), dtype=dtype)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return weights


def load_theirs(weights: dict[str, torch.Tensor], config: dict[str, Any], dtype: torch.dtype) -> Qwen3_5MoeForCausalLM:
    model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**config)).eval().to(dtype)
    ours = {name: tensor for name, tensor in weights.items() if not name.startswith("mtp.")}
    absent, _ = model.load_state_dict(ours, strict=False)
    if absent:
        raise SystemExit(f"transformers wants {absent[0]}, which the random weights do not have.")
    return model


def pocket() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The pocket model's weights by the names of a text-only model, and its config."""
    config = json.loads((POCKET / "config.json").read_text())["text_config"]
    weights = load_file(POCKET / "model.safetensors")
    return {name.replace("model.language_model.", "model."): weight for name, weight in weights.items()}, config


def random_prompts(streams: int, vocabulary: int) -> list[list[int]]:
    most = min(7000, vocabulary)
    return [[(7 * i * i + 3 * i + 11 * s) % most for i in range(PROMPT)] for s in range(streams)]


def invoice_prompts(streams: int) -> list[list[int]]:
    """Unseen invoices, all as long as the shortest: of a longer one the beginning is left out."""
    template, tokenizer = ChatTemplate.load(POCKET), Tokenizer.load(POCKET)
    examples = [MEASURED["invoice"](random.Random(HELD_OUT_SEED + number)) for number in range(streams)]
    ids = [tokenizer.encode(prompt_text(example, template)) for example in examples]
    shortest = min(map(len, ids))
    return [list(some[-shortest:]) for some in ids]


class Took(NamedTuple):
    """What the tokens after the first took."""

    seconds: float
    cpu_seconds: float


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def time_theirs(model: Qwen3_5MoeForCausalLM, asked: list[list[int]], tokens: int) -> tuple[Took, list[list[int]]]:
    """(what the tokens after the first took, the tokens)."""
    ids = torch.tensor(asked)

    def generate(count: int) -> tuple[Took, torch.Tensor]:
        began, cpu_began = clocks()
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        ended, cpu_ended = clocks()
        return Took(ended - began, cpu_ended - cpu_began), made[:, ids.shape[1] :]

    first, _ = generate(1)
    whole, made = generate(tokens)
    return Took(whole.seconds - first.seconds, whole.cpu_seconds - first.cpu_seconds), made.tolist()


def time_ours(engine: Engine, asked: list[list[int]], tokens: int, name: str) -> tuple[Took, list[list[int]]]:
    """(what all took from the first token on, the tokens)."""
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    handles = engine.submit_all(
        [Request(f"{name}/{s}", tuple(ids), sampling, cache_prompt=False) for s, ids in enumerate(asked)]
    )
    firsts, lasts, made = [], [], []
    for handle in handles:
        answer: list[int] = []
        for event in handle:
            if isinstance(event, Failed):
                raise SystemExit(event.message)
            if isinstance(event, Tokens):
                firsts += [clocks()] if not answer else []
                answer += event.token_ids
        lasts.append(clocks())
        made.append(answer)
    # Streams start together; later handles are read after the first is done, so the first one's start counts.
    return Took(*(end - start for start, end in zip(firsts[0], max(lasts), strict=True))), made


def measure(
    engine: Engine, theirs: Qwen3_5MoeForCausalLM, asked: list[list[int]], rounds: int, tokens: int
) -> dict[str, Took]:
    """What a step of "ours" and "theirs" takes; says how many answers were equal."""
    took: dict[str, list[Took]] = {"ours": [], "theirs": []}
    for number in range(rounds + 1):
        name = f"{torch.get_num_threads()}/{len(asked)}/{number}"
        mine, my_tokens = time_ours(engine, asked, tokens, name)
        other, their_tokens = time_theirs(theirs, asked, tokens)
        if number:  # the first warms up
            took["ours"].append(mine)
            took["theirs"].append(other)
    step = {
        side: Took(*(statistics.median(part) / (tokens - 1) for part in zip(*times, strict=True)))
        for side, times in took.items()
    }
    same = sum(a == b for a, b in zip(my_tokens, their_tokens, strict=True))
    told = [f"{step[side].seconds * 1e3:.2f} ms a token (CPU {step[side].cpu_seconds * 1e3:.2f})" for side in step]
    print(
        f"{len(asked)} streams, {torch.get_num_threads()} threads: onebox {told[0]}, transformers {told[1]}; "
        f"{same} of {len(asked)} answers equal",
        flush=True,
    )
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SIZES, "pocket"], default="mid")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--speculation", default="none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    dtype = DTYPES[given.dtype]
    best: dict[tuple[int, str], Took] = {}
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        if given.model == "pocket":
            (weights, config), directory = pocket(), POCKET
            asked = {streams: invoice_prompts(streams) for streams in (1, 8)}
        else:
            config, directory = SIZES[given.model], Path(scratch)
            weights = write(directory, config, dtype)
            asked = {streams: random_prompts(streams, config["vocab_size"]) for streams in (1, 8)}
        theirs = load_theirs(weights, config, dtype)
        options = EngineOptions(device="cpu", dtype=given.dtype, speculation=given.speculation, max_model_len=2048)
        vocabulary = TokenInfo()
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with start_engine(plan_engine(directory, options, vocabulary), vocabulary) as engine:
                for streams, ids in asked.items():
                    for side, took in measure(engine, theirs, ids, given.rounds, given.tokens).items():
                        best[streams, side] = min(took, best.get((streams, side), took))
    result: dict[str, str | float] = {
        "model": given.model,
        "dtype": given.dtype,
        "speculation": given.speculation,
        "tokens": given.tokens,
    }
    for streams in (1, 8):
        ours, other = best[streams, "ours"], best[streams, "theirs"]
        result[f"ours_{streams}_ms"] = round(ours.seconds * 1e3, 3)
        result[f"theirs_{streams}_ms"] = round(other.seconds * 1e3, 3)
        result[f"ratio_{streams}"] = round(other.seconds / ours.seconds, 3)
        result[f"cpu_ratio_{streams}"] = round(other.cpu_seconds / ours.cpu_seconds, 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
