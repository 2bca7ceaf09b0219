"""How much of an INT8 head's low plane a step must read, by the bits of the low plane, the sampling and the rows.

    python benchmarks/head_planes.py [--examples 2]

Two parts. The pocket model's own head and hidden states: answers of its workloads, and prose. Then a head of the 122B's
size, which is not on this machine: rows and hidden states in random directions, so that logits spread as |w| |x| /
sqrt(hidden), which the pocket model's do to within a third (printed). A split 6+2 reads six bits of every code first.
A token is completed unless its upper bound is below the row's k-th largest complete logit (greedy: the largest), or,
drawn at temperature 1 without limits, below the value that wins with its noise. Rows of a step are completed together:
three rows are neighbouring places of one answer, twelve of several. The last line is JSON.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from random import Random

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from onebox.formats import quantize_int8_rows
from onebox.model.reference import Cache, forward
from onebox.model.reference_weights import load_weights
from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.synthetic.workloads import HELD_OUT_SEED, MEASURED, render

SPLITS = (2, 3, 4)
SAMPLING = ("greedy", "top_k 20", "temperature 1")
ROWS = (1, 3, 12)
LARGE_VOCABULARY, LARGE_HIDDEN = 248_320, 3_072
PROSE = Path(__file__).parent.parent / "docs" / "operating.md"


def hidden_states(num_examples: int) -> tuple[Tensor, Tensor]:
    """(hidden states [n, 256] where the pocket model answers or continues prose, its LM head [8192, 256])."""
    spec, weights, _ = load_weights(MODEL_DIRECTORY)
    tokenizer, template = Tokenizer.load(MODEL_DIRECTORY), ChatTemplate.load(MODEL_DIRECTORY)

    def states(token_ids: list[int]) -> Tensor:
        return forward(spec, weights, torch.tensor(token_ids), Cache.empty(spec))

    found = []
    with torch.inference_mode():
        for name, generate in MEASURED.items():
            if name != "retrieval":  # long prompts, short answers
                for seed in range(num_examples):
                    token_ids, first = render(generate(Random(HELD_OUT_SEED + seed)), tokenizer, template)
                    found.append(states(token_ids)[first - 1 : -1])
        found.append(states(list(tokenizer.encode(PROSE.read_text())[:512]))[128:])
    return torch.cat(found), weights["lm_head.weight"]


def bounds(x: Tensor, codes: Tensor, scale: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(middles, how far the complete logits may be from them), both [n, V], if `bits` of each code are left out."""
    low = codes.to(torch.int32).bitwise_and(2**bits - 1).to(torch.float32) - (2**bits - 1) / 2
    middle = x @ (codes.to(torch.float32) - low).T * scale
    return middle, torch.outer(x.norm(dim=1), low.norm(dim=1) * scale)


def is_completed(logits: Tensor, middle: Tensor, radius: Tensor, sampling: str, noise: Tensor) -> Tensor:
    """Whether each token of [n, V] must be completed for its row alone."""
    if sampling == "temperature 1":
        return middle + radius + noise >= (logits + noise).amax(1, keepdim=True)
    best = 1 if sampling == "greedy" else 20
    return middle + radius >= logits.topk(best, dim=1).values[:, -1:]


def shares(completed: Tensor, order: Tensor) -> list[float]:
    """The share of tokens that steps of 1, 3 and 12 rows complete: a step's rows together."""
    found = []
    for rows in ROWS:
        places = order if rows == max(ROWS) else torch.arange(len(completed))
        steps = completed[places[: len(places) // rows * rows]].view(-1, rows, completed.shape[1])
        found.append(steps.any(1).float().mean().item())
    return found


def table(logits: Tensor, cut: dict[int, tuple[Tensor, Tensor]], generator: torch.Generator) -> list[dict[str, object]]:
    order = torch.randperm(len(logits), generator=generator)
    noise = -torch.log(-torch.log(torch.rand(logits.shape, generator=generator)))
    lines = []
    for bits, (middle, radius) in cut.items():
        for sampling in SAMPLING:
            completed = is_completed(logits, middle, radius, sampling, noise)
            split, spread = f"{8 - bits}+{bits}", float((radius.mean(1) / logits.std(1)).mean())
            lines.append({"split": split, "sampling": sampling, "radius": spread, "shares": shares(completed, order)})
    return lines


def pocket(num_examples: int) -> dict[str, object]:
    x, weight = hidden_states(num_examples)
    codes, scale = quantize_int8_rows(weight)
    logits = x @ codes.to(torch.float32).T * scale
    product = x.norm(dim=1) * weight.norm(dim=1).mean()
    isotropic = float((logits.std(1) / (product / math.sqrt(x.shape[1]))).mean())
    cut = {bits: bounds(x, codes, scale, bits) for bits in SPLITS}
    return {
        "states": len(x),
        "spread against random directions": isotropic,
        "largest code in spreads of a row": float((127 / codes.to(torch.float32).std(1)).mean()),
        "lines": table(logits, cut, torch.Generator().manual_seed(0)),
    }


def large() -> dict[str, object]:
    """In units of the logits' spread. A row's largest code is 3.65 spreads, as of 3,072 normal numbers."""
    generator = torch.Generator().manual_seed(1)
    num_rows = 24
    logits = torch.randn(num_rows, LARGE_VOCABULARY, generator=generator)
    # Half of the rows are sure of a token, the others choose among what is in reach: the worse case for greedy.
    logits[::2, 0] = 8.0
    cut = {}
    for bits in SPLITS:
        rounding = math.sqrt((4**bits - 1) / 12)
        radius = rounding * math.sqrt(LARGE_HIDDEN) / (127 / 3.65)
        cut[bits] = (logits, torch.full((num_rows, 1), radius))
    # At temperature 1 the noise counts in units of a logit: a spread is about 2.5 of them.
    spread = 2.5
    scaled = {bits: (middle * spread, radius * spread) for bits, (middle, radius) in cut.items()}
    return {"lines": table(logits * spread, scaled, generator)}


def report(title: str, found: dict[str, object]) -> None:
    facts = ", ".join(f"{name} {value:.3g}" for name, value in found.items() if isinstance(value, int | float))
    sys.stdout.write(f"\n{title}{': ' + facts if facts else ''}\n")
    sys.stdout.write("split  sampling        bound, in spreads of the logits   completed by 1, 3, 12 rows\n")
    for line in found["lines"]:
        cells = "   ".join(f"{share:7.3%}" for share in line["shares"])
        sys.stdout.write(f"{line['split']}    {line['sampling']:<15} {line['radius']:<33.2f} {cells}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--examples", type=int, default=2, help="of each workload")
    found = {"pocket": pocket(parser.parse_args().examples), "large": large()}
    report("The pocket model, 8,192 tokens of 256", found["pocket"])
    report("Random directions, 248,320 tokens of 3,072", found["large"])
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
