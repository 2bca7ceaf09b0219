"""Times the model on a CPU, where the kernels' plain twins run, beside transformers on the same weights.

    python benchmarks/cpu_twins.py [--threads 2] [--rounds 5] [--profile]

A small model of the family in float32 with random weights. A step is the model from token ids to logits; scheduling and
sampling are not in it. Ours and theirs take turns in every round, because other work may share the machine; a row tells
the fastest round. The last line is JSON.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3_5MoeForCausalLM
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

sys.path.insert(0, str(Path(__file__).parent.parent))

from onebox.model.assemble import load_model
from onebox.model.linear import Phase
from onebox.model.memory import Memory, MemoryShape
from onebox.model.qwen3_5 import Batch, Qwen35, Stage
from onebox.model.random import TINY, random_weights
from onebox.spec.kv import KVFormat
from onebox.spec.model import spec_from_config

PAGE = 64
NEW_TOKENS = 16
TEXT = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "vocab_size": 8192,
}
CONFIG = {**TINY["text_config"], **TEXT}


def models(directory: Path) -> tuple[Qwen35, Qwen3_5MoeForCausalLM]:
    """Ours and theirs under the same weights."""
    weights = random_weights(spec_from_config(CONFIG), dtype=torch.float32)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))
    theirs = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**CONFIG)).eval().to(torch.float32)
    absent, _ = theirs.load_state_dict({k: v for k, v in weights.items() if not k.startswith("mtp.")}, strict=False)
    if absent:
        raise SystemExit(f"transformers wants {absent[0]}, which the random weights do not have.")
    return load_model(directory, torch.device("cpu"), torch.float32), theirs


def batch(streams: int, rows: int, context: int, phase: Phase) -> Batch:
    """`streams` sequences of `rows` rows each, the last of them at `context` tokens, one pending token kept."""
    pages = -(-context // PAGE)
    table = torch.arange(streams * pages, dtype=torch.int32).view(streams, pages)
    places = torch.arange(context - rows, context).repeat(streams)
    sequence = torch.arange(streams).repeat_interleave(rows)
    cu_rows = torch.arange(0, streams * rows + 1, rows, dtype=torch.int32)
    slots, none = torch.arange(streams, dtype=torch.int32), torch.empty(0, dtype=torch.int64)
    return Batch(
        phase=phase,
        token_ids=torch.randint(0, CONFIG["vocab_size"] - 500, (streams * rows,)),
        positions=places.expand(3, -1).contiguous(),
        cu_rows=cu_rows,
        slots=slots,
        keep=torch.ones(streams, dtype=torch.int32),
        seen=torch.full((streams,), context, dtype=torch.int32),
        page_table=table,
        kv_slots=table[sequence, places // PAGE].long() * PAGE + places % PAGE,
        stages=(Stage(0, streams * rows, cu_rows, slots, none, none),),
    )


def ours(model: Qwen35, streams: int, rows: int, context: int, phase: Phase) -> Callable[[], None]:
    """One step or prefill, from token ids to logits; repeating it changes states, not the work."""
    work = batch(streams, rows, context, phase)
    shape = MemoryShape(KVFormat.parse("bf16"), streams * -(-context // PAGE), streams, 0, 9, with_mtp=False)
    memory = Memory.allocate(model.spec, shape, model.dtype, model.device)

    def run() -> None:
        hidden = model.forward(work, memory)
        model.logits(hidden if phase is Phase.DECODE else hidden[-1:])

    return run


def generate(model: Qwen3_5MoeForCausalLM, streams: int, new_tokens: int) -> Callable[[], None]:
    """Their own loop: prompts of 64 tokens, then so many greedy tokens each."""
    prompt = torch.randint(0, CONFIG["vocab_size"] - 500, (streams, 64))

    def run() -> None:
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )

    return run


def seconds(run: Callable[[], None], repeats: int) -> float:
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - begin) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print where a step of 8 rows spends its time, and stop")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        model, theirs = models(Path(directory))
        if given.profile:
            profile(ours(model, 8, 1, 64, Phase.DECODE))
            return
        work = workloads(model, theirs)
        best = dict.fromkeys(work, float("inf"))
        for round_number in range(given.rounds + 1):
            for name, (run, repeats) in work.items():
                took = seconds(run, repeats)
                if round_number:  # the first warms up
                    best[name] = min(best[name], took)
    for streams in (1, 8):
        # The prompt's share is taken off: what is left are the steps.
        long, short = (best.pop(f"{streams} streams, {tokens} tokens") for tokens in (NEW_TOKENS + 1, 1))
        best[f"transformers, a step of {streams} streams"] = (long - short) / NEW_TOKENS
    for name, took in best.items():
        print(f"{took * 1e3:9.2f} ms  {name}")
    print(json.dumps({"threads": given.threads, **{name: round(took * 1e3, 3) for name, took in best.items()}}))


def workloads(model: Qwen35, theirs: Qwen3_5MoeForCausalLM) -> dict[str, tuple[Callable[[], None], int]]:
    """What is timed by name, and how often it runs in a round."""
    work: dict[str, tuple[Callable[[], None], int]] = {}
    for context in (64, 2000):
        for streams, rows in ((1, 1), (8, 1), (8, 3)):
            name = f"step of {streams * rows} rows, {streams} streams, context {context}"
            work[name] = ours(model, streams, rows, context, Phase.DECODE), 10
    for length in (512, 4000):
        work[f"prefill of {length}"] = ours(model, 1, length, length, Phase.PREFILL), 1
    for streams in (1, 8):
        for tokens in (1, NEW_TOKENS + 1):
            work[f"{streams} streams, {tokens} tokens"] = generate(theirs, streams, tokens), 1
    return work


def profile(run: Callable[[], None]) -> None:
    for _ in range(5):
        run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for _ in range(10):
            run()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=40))


if __name__ == "__main__":
    main()
