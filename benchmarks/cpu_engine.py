"""Decoding on a CPU: the whole engine beside transformers' generate, on the same small checkpoint, in one run.

    python benchmarks/cpu_engine.py [--size mid] [--dtype bfloat16] [--rounds 5] [--tokens 64]

A small model of the family with random weights, prompts of 64 tokens, greedy, no speculation; both sides in one dtype.
Both take turns in every round, because other work may share the machine; medians are compared. Each side runs with one
and with two threads, and its better one counts. A stream's time is that of all tokens after the first: prompts do not
count. The engine keeps keys and values in bfloat16, so where two tokens are nearly as likely answers may differ. The
last line is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3_5MoeForCausalLM
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

sys.path.insert(0, str(Path(__file__).parent.parent))

from onebox.engine.api import Engine, Failed, Request, SamplingParams, Tokens
from onebox.engine.open import EngineOptions, Vocabulary, plan_engine, start_engine
from onebox.model.random import TINY, random_weights
from onebox.spec.model import spec_from_config

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


def prompts(streams: int, vocabulary: int) -> list[list[int]]:
    most = min(7000, vocabulary)
    return [[(7 * i * i + 3 * i + 11 * s) % most for i in range(PROMPT)] for s in range(streams)]


def time_theirs(model: Qwen3_5MoeForCausalLM, streams: int, tokens: int) -> tuple[float, list[list[int]]]:
    """(seconds for the tokens after the first, the tokens)."""
    ids = torch.tensor(prompts(streams, model.config.vocab_size))

    def generate(count: int) -> tuple[float, torch.Tensor]:
        began = time.perf_counter()
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - began, made[:, PROMPT:]

    first, _ = generate(1)
    whole, made = generate(tokens)
    return whole - first, made.tolist()


def time_ours(engine: Engine, asked: list[list[int]], tokens: int, name: str) -> tuple[float, list[list[int]]]:
    """(seconds from the last stream's first token to the last token, the tokens)."""
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
                firsts += [time.perf_counter()] if not answer else []
                answer += event.token_ids
        lasts.append(time.perf_counter())
        made.append(answer)
    # Streams start together; later handles are read after the first is done, so the first one's start counts.
    return max(lasts) - firsts[0], made


def measure(engine: Engine, theirs: Qwen3_5MoeForCausalLM, streams: int, rounds: int, tokens: int) -> dict[str, float]:
    """Seconds a step of "ours" and "theirs"; says how many answers were equal."""
    took: dict[str, list[float]] = {"ours": [], "theirs": []}
    for number in range(rounds + 1):
        name = f"{torch.get_num_threads()}/{streams}/{number}"
        mine, my_tokens = time_ours(engine, prompts(streams, theirs.config.vocab_size), tokens, name)
        other, their_tokens = time_theirs(theirs, streams, tokens)
        if number:  # the first warms up
            took["ours"].append(mine)
            took["theirs"].append(other)
    step = {side: statistics.median(times) / (tokens - 1) for side, times in took.items()}
    same = sum(a == b for a, b in zip(my_tokens, their_tokens, strict=True))
    print(
        f"{streams} streams, {torch.get_num_threads()} threads: onebox {step['ours'] * 1e3:.2f} ms a step, "
        f"transformers {step['theirs'] * 1e3:.2f} ms; {same} of {streams} answers equal",
        flush=True,
    )
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="mid")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    config, dtype = SIZES[given.size], DTYPES[given.dtype]
    best: dict[tuple[int, str], float] = {}
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        theirs = load_theirs(write(Path(directory), config, dtype), config, dtype)
        options = EngineOptions(device="cpu", dtype=given.dtype, speculation="none", max_model_len=2048)
        vocabulary = Vocabulary()
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with start_engine(plan_engine(Path(directory), options, vocabulary), vocabulary) as engine:
                for streams in (1, 8):
                    for side, seconds in measure(engine, theirs, streams, given.rounds, given.tokens).items():
                        best[streams, side] = min(seconds, best.get((streams, side), seconds))
    result: dict[str, str | float] = {"size": given.size, "dtype": given.dtype, "tokens": given.tokens}
    for streams in (1, 8):
        ours, other = best[streams, "ours"], best[streams, "theirs"]
        result |= {f"ours_{streams}_ms": round(ours * 1e3, 3), f"theirs_{streams}_ms": round(other * 1e3, 3)}
        result[f"ratio_{streams}"] = round(other / ours, 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
