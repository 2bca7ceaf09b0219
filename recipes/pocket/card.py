"""The pocket model's card: what it is, what it was trained on, and what it is not."""

from collections.abc import Mapping
from typing import Any

from onebox.spec.model import ModelSpec
from recipes.pocket.config import num_parameters

__all__ = ["model_card"]

_CARD = """\
---
license: apache-2.0
language: [en, hu, tr]
library_name: onebox
---

# The pocket model

A language model of {millions:.1f} million parameters with the architecture of Qwen3.5-MoE: {layers} layers, three of
four with a gated delta rule and the fourth with gated attention, {experts} experts of which a token uses {used} and one
shared expert, and an MTP head. It was trained from scratch by the recipe beside it (`onebox/pocket`) on one GPU in
minutes.

It is there to be run: by `onebox serve` without a model of one's own, by the tests, and by every table that compares
formats, caches and speculation, which random weights cannot stand for.

## What it can do

It answers in the chat format, with and without thinking, turns invoices like those of its training into JSON, calls
tools in the XML form, adds small numbers, and finds a key in some thousand tokens of text. It continues technical prose
in English, Hungarian and Turkish, and Python. `docs/pocket.md` has its measured scores, and where it falls short.

## What it is not

It is no assistant. It knows next to nothing of the world, and what it says outside of the tasks above is fluent and
wrong. It has no vision tower and was not trained to refuse anything. Nothing should be decided by it.

## What it was trained on

Examples made by the generators in `onebox/pocket`, and these texts:

| source | language | licence | tokens |
|---|---|---|---|
{sources}

## Licence

The weights are offered under Apache-2.0, to the extent that there are rights in them. Nearly half of the text they were
trained on is documentation and translations under copyleft licences (GPL, LGPL, CC-BY-SA, MPL); the rest is
documentation, a dictionary and code under permissive ones. None of it is passed on here, and
`onebox/pocket/LICENCES.md` lists every package with its licence. Whether such licences reach a model's weights is not
settled, and this card does not settle it.

## Form

BF16 safetensors under the names of Qwen3.5's own checkpoints; byte-level BPE of {vocabulary:,} tokens with the family's
control tokens and chat template. Sides of matrices are multiples of 128, so `onebox build` makes every format of it.
"""


def model_card(spec: ModelSpec, sources: Mapping[str, Mapping[str, Any]]) -> str:
    """README.md of the artefact; `sources` is the index of the training text."""
    rows = (
        f"| {name} | {source['language']} | {source['licence']} | {source['tokens']:,} |"
        for name, source in sources.items()
    )
    return _CARD.format(
        millions=num_parameters(spec) / 1e6,
        layers=spec.num_hidden_layers,
        experts=spec.num_experts,
        used=spec.num_experts_per_tok,
        vocabulary=spec.vocab_size,
        sources="\n".join(rows),
    )
