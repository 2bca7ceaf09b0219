"""Decoding on a CPU: the whole engine beside transformers' generate, on the same small checkpoint, in one run.

    python benchmarks/cpu_engine.py [--threads 2] [--rounds 5] [--tokens 64]

A small model of the family in float32 with random weights, prompts of 64 tokens, greedy, no speculation. Both take
turns in every round, because other work may share the machine; medians are compared. A stream's time is that of all
tokens after the first: prompts do not count. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

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
CONFIG = {
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


def write(directory: Path) -> dict[str, torch.Tensor]:
    weights = random_weights(spec_from_config(CONFIG), dtype=torch.float32)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return weights


def load_theirs(weights: dict[str, torch.Tensor]) -> Qwen3_5MoeForCausalLM:
    model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**CONFIG)).eval().to(torch.float32)
    ours = {name: tensor for name, tensor in weights.items() if not name.startswith("mtp.")}
    absent, _ = model.load_state_dict(ours, strict=False)
    if absent:
        raise SystemExit(f"transformers wants {absent[0]}, which the random weights do not have.")
    return model


def prompts(streams: int) -> list[list[int]]:
    return [[(7 * i * i + 3 * i + 11 * s) % 7000 for i in range(PROMPT)] for s in range(streams)]


def time_theirs(model: Qwen3_5MoeForCausalLM, streams: int, tokens: int) -> tuple[float, list[list[int]]]:
    """(seconds for the tokens after the first, the tokens)."""
    ids = torch.tensor(prompts(streams))

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


def time_ours(engine: Engine, streams: int, tokens: int, name: str) -> tuple[float, list[list[int]]]:
    """(seconds from the last stream's first token to the last token, the tokens)."""
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    handles = engine.submit_all(
        [Request(f"{name}/{s}", tuple(ids), sampling, cache_prompt=False) for s, ids in enumerate(prompts(streams))]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    result: dict[str, float] = {"threads": given.threads, "tokens": given.tokens}
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        theirs = load_theirs(write(Path(directory)))
        options = EngineOptions(device="cpu", dtype="float32", speculation="none", max_model_len=2048)
        vocabulary = Vocabulary()
        with start_engine(plan_engine(Path(directory), options, vocabulary), vocabulary) as engine:
            for streams in (1, 8):
                took: dict[str, list[float]] = {"ours": [], "theirs": []}
                for number in range(given.rounds + 1):
                    mine, my_tokens = time_ours(engine, streams, given.tokens, f"{streams}/{number}")
                    other, their_tokens = time_theirs(theirs, streams, given.tokens)
                    if number:  # the first warms up
                        took["ours"].append(mine)
                        took["theirs"].append(other)
                same = sum(a == b for a, b in zip(my_tokens, their_tokens, strict=True))
                step = {name: statistics.median(times) / (given.tokens - 1) for name, times in took.items()}
                ratio = step["theirs"] / step["ours"]
                print(
                    f"{streams} streams: onebox {step['ours'] * 1e3:.2f} ms a step, transformers "
                    f"{step['theirs'] * 1e3:.2f} ms, {ratio:.2f} times as fast; {same} of {streams} answers equal",
                    flush=True,
                )
                result |= {f"ours_{streams}_ms": step["ours"] * 1e3, f"theirs_{streams}_ms": step["theirs"] * 1e3}
                result[f"ratio_{streams}"] = ratio
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
