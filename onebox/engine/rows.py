"""What one sequence adds to a step, a stretch of its prompt or rows of its answer, and how its tokens are drawn."""

from onebox.engine.sequence import Sequence
from onebox.engine.step import DecodeRows, DraftCheck, Draw, PromptChunk, StateSave

__all__ = ["decode_rows", "prompt_chunk", "slot_of"]


def slot_of(sequence: Sequence) -> int:
    if sequence.slot is None:
        raise RuntimeError(f"Request {sequence.request.request_id} has no slot.")
    return sequence.slot


def prompt_chunk(sequence: Sequence, length: int, saves: tuple[StateSave, ...]) -> PromptChunk:
    """The next `length` tokens of a prompt."""
    prompt, start = sequence.request.prompt, sequence.num_computed
    end = start + length
    is_last = end == len(prompt)
    wants_logprobs = end - 1 > sequence.num_prompt_logprobs
    return PromptChunk(
        request_id=sequence.request.request_id,
        slot=slot_of(sequence),
        token_ids=prompt[start:end],
        start=start,
        pages=sequence.pages,
        saves=saves,
        draw=_draw_after_prompt(sequence) if is_last else None,
        prompt_logprobs=sequence.request.sampling.prompt_logprobs if wants_logprobs else None,
        following=None if is_last else prompt[end],
        images=sequence.images,
    )


def _draw_after_prompt(sequence: Sequence) -> Draw:
    """How the token after the prompt is drawn; where it was sampled before a preemption, it is certain."""
    sampling, (drafter, depth) = sequence.request.sampling, sequence.speculation.plan_next(_max_drafts(sequence))
    if len(sequence.tokens) > sequence.num_prompt:
        return Draw(sampling, (sequence.tokens[sequence.num_prompt],), (DraftCheck.ACCEPT,), first_new=1)
    _, adjustments = sequence.logits_rules.adjust(())
    return Draw(sampling, (-1,), (DraftCheck.COMPARE,), 0, adjustments, depth, drafter=drafter)


def decode_rows(sequence: Sequence, limit: int) -> DecodeRows:
    """At most `limit` rows of an answer: tokens that are certain but not computed yet, then drafts."""
    certain, speculation = sequence.tokens[sequence.num_computed :], sequence.speculation
    if len(certain) > limit:
        token_ids = tuple(certain[:limit])
        draw = Draw(
            sequence.request.sampling, tuple(certain[1 : limit + 1]), (DraftCheck.ACCEPT,) * limit, first_new=limit
        )
    else:
        max_drafts = _max_drafts(sequence)
        proposed = speculation.propose(min(limit - len(certain), max_drafts))
        drafts, adjustments = sequence.logits_rules.adjust(proposed)
        token_ids = (*certain, *drafts)
        drafter, depth = speculation.plan_next(max_drafts)
        draw = Draw(
            sampling=sequence.request.sampling,
            next_ids=(*token_ids[1:], -1),
            checks=(
                *[DraftCheck.ACCEPT] * (len(certain) - 1),
                *speculation.checks(len(sequence.tokens), len(drafts)),
                DraftCheck.COMPARE,
            ),
            first_new=len(certain) - 1,
            adjustments=adjustments,
            depth=depth,
            continues=max_drafts > 0 and speculation.is_from_head,
            drafter=drafter,
        )
    return DecodeRows(
        sequence.request.request_id,
        slot_of(sequence),
        token_ids,
        sequence.num_computed,
        sequence.num_accepted,
        sequence.pages,
        draw,
        sequence.images.position_offset if sequence.images else 0,
    )


def _max_drafts(sequence: Sequence) -> int:
    """Drafts that can still be used: the row before them gives a token by itself."""
    return max(0, sequence.max_tokens - sequence.num_sampled - 1)
