"""How much a token's error counts: by how uncertain the source is of the token after it.

A small error d of a token's logits makes a KL of half the variance of d under the predicted probabilities p, and the
trace of that form is 1 - sum(p^2): nothing where the next token is certain. So errors at certain tokens, which are many
in answers and code, leave room for those that change predictions. Some of an error reaches the tokens after it through
the mixers, so no token counts nothing.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812 - the name the whole torch world uses
from torch import Tensor

from onebox.model.reference import zero_centred_norm
from onebox.quantize.blocks import BlockWeights
from onebox.quantize.forward import add_source_experts, mix
from onebox.spec.model import ModelSpec

__all__ = ["LOGIT_ROWS", "token_weights"]

LOGIT_ROWS = 256
"""Rows of logits computed at a time."""
_FLOOR = 0.1
"""What every token counts, beside a mean of 1 by uncertainty. In the pocket model the squared gradients of the
predictions by the stream behind the first layers are a tenth of their mean at the tokens of the most certain eighth."""


def token_weights(
    spec: ModelSpec, blocks: Iterable[BlockWeights], stream: Tensor, norm: Tensor, head: Tensor
) -> Tensor:
    """Weights float32 [sequences, tokens], 1 in the mean, by the source's predictions.

    `stream` are embeddings [sequences, tokens, hidden], which are taken through all blocks, in place; `norm` [hidden]
    and `head` [vocabulary, hidden] are the final norm's weight and the LM head's, on the device that computes.
    """
    for weights in blocks:
        dense = weights.dense(built=False)
        mix(spec, weights, dense, stream)
        add_source_experts(spec, weights, dense, stream)
    rows = stream.flatten(0, 1).split(LOGIT_ROWS)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        found = torch.cat([_uncertainties(spec, part.to(head.device), norm, head).cpu() for part in rows])
    found = found / found.mean().clamp(min=torch.finfo(torch.float32).tiny) + _FLOOR
    return (found / found.mean()).view(stream.shape[:-1])


def _uncertainties(spec: ModelSpec, x: Tensor, norm: Tensor, head: Tensor) -> Tensor:
    """1 - sum(p^2) [n] of the predictions behind the last block's stream x [n, hidden]."""
    logits = F.linear(zero_centred_norm(x, norm, spec.rms_norm_eps), head)
    return 1 - logits.softmax(dim=-1).square().sum(dim=-1)
