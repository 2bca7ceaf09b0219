"""Acceptance of the drafter on answered rows: how many drafts of a block hold at each place, and tokens a step.

The rows are the target's own greedy answers, so a draft holds where the text has it; no engine is needed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole torch world uses
from torch import Tensor

from recipes.pocket.drafter.network import DrafterNetwork
from recipes.pocket.drafter.target import AnsweredRows, Target

__all__ = ["Steps", "held_drafts", "labels_of", "tokens_a_step"]

_ANCHORS_AT_ONCE = 128


def labels_of(rows: AnsweredRows, anchors: Tensor, num_drafts: int) -> tuple[Tensor, Tensor]:
    """The right token at each of the n places behind an anchor, and whether it counts; both [B, A, n].

    A place counts while the row goes on as the target would: the first that differs still does, as the target's token.
    """
    places = anchors[:, :, None] + torch.arange(1, num_drafts + 1, device=anchors.device)
    inside = places < rows.tokens.shape[1]
    at = places.clamp(max=rows.tokens.shape[1] - 1).flatten(1)
    predicted, tokens, said = (
        part.gather(1, at).view_as(places) for part in (rows.predicted, rows.tokens, rows.is_answer)
    )
    agrees = torch.cat([torch.ones_like(inside[..., :1]), (predicted == tokens)[..., :-1]], dim=-1)
    return predicted, (inside & said & agrees).cumprod(-1).bool()


@torch.no_grad()
def held_drafts(
    network: DrafterNetwork, weights: Mapping[str, Tensor], target: Target, rows: AnsweredRows, num_drafts: int
) -> list[dict[int, int]]:
    """For each row, the drafts that hold behind every position of its answers."""
    return [
        dict(
            pair
            for part in _held(
                network, weights, target, rows.take(torch.tensor([row], device=target.device)), num_drafts
            )
            for pair in part
        )
        for row in range(len(rows))
    ]


def _held(
    network: DrafterNetwork, weights: Mapping[str, Tensor], target: Target, row: AnsweredRows, num_drafts: int
) -> Iterator[list[tuple[int, int]]]:
    for anchors in torch.split(row.is_answer[0].nonzero().T, _ANCHORS_AT_ONCE, dim=1):
        right, counts = labels_of(row, anchors, num_drafts)
        hidden = network.hidden(weights, row.features, embed_blocks(network, target, row, anchors, num_drafts), anchors)
        drafts = F.linear(hidden[:, :, 1:].to(target.head.dtype), target.head).argmax(-1)
        held = ((drafts == right) & counts).cumprod(-1).sum(-1)
        yield list(zip(anchors[0].tolist(), held[0].tolist(), strict=True))


def embed_blocks(
    network: DrafterNetwork, target: Target, rows: AnsweredRows, anchors: Tensor, num_drafts: int
) -> Tensor:
    """Embeddings [B, A, 1 + n, H]: the anchor's token and masks."""
    masks = torch.full((*anchors.shape, num_drafts), network.spec.mask_token_id, device=anchors.device)
    return F.embedding(torch.cat([rows.tokens.gather(1, anchors).unsqueeze(-1), masks], dim=-1), target.embedding)


@dataclass
class Steps:
    """Decode steps and the tokens that they made."""

    num_steps: int = 0
    num_tokens: int = 0

    def add(self, other: "Steps") -> None:
        self.num_steps += other.num_steps
        self.num_tokens += other.num_tokens

    @property
    def tokens_a_step(self) -> float:
        return self.num_tokens / max(1, self.num_steps)


def tokens_a_step(held: Mapping[int, int]) -> Steps:
    """A walk over one row's answers as an engine decodes them: a step makes the drafts that hold and one token."""
    steps, places = Steps(), sorted(held)
    ends = [place for place in places if place + 1 not in held]
    place = places[0] if places else None
    while place is not None:
        end = next(end for end in ends if end >= place)
        made = min(held[place] + 1, end - place)
        if made > 0:
            steps.add(Steps(1, made))
            place += made
            continue
        place = next((other for other in places if other > end), None)
    return steps
