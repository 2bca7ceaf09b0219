"""Single stream: one request at a time, warm-up first, then cold and warm prompts in turn.

A cold request's prompt begins with a nonce, so none of it can be cached. The warm request that follows is the same
request again, at full length: its TTFT and its speeds are figures of their own.
"""

from dataclasses import replace

from onebox.bench.record import Role, WorkloadKind, WorkloadRecord
from onebox.bench.session import Prepared, Session
from onebox.bench.tally import WorkloadTally
from onebox.bench.tasks import Task

__all__ = ["WARM_UP_PROMPT", "run_single", "warm_up"]

WARM_UP_PROMPT = 8192
"""No warm-up beyond this length: its prefill may cost as much as it saves."""
_WARM_UP_TOKENS = 32


async def warm_up(session: Session, tally: WorkloadTally, prepared: Prepared) -> None:
    """One request excluded from all figures; it triggers the server's first-time work."""
    ask = prepared.ask(session.nonce())
    answer = await session.send(replace(ask, max_tokens=min(ask.max_tokens, _WARM_UP_TOKENS)))
    tally.add(answer, Role.WARM_UP)
    session.warmed.add(prepared.task.key)


async def run_single(session: Session, task: Task) -> WorkloadRecord:
    """Measures one task in a single stream, or returns a skipped workload with the reason."""
    reason = session.reason_to_skip(task)
    if reason:
        return session.skipped(task.title, WorkloadKind.SINGLE, reason)
    settings = session.settings
    session.watch.begin(task.title, settings.warm_ups + 2 * settings.runs)
    prepared = await session.prepare(task)
    if prepared.too_long:
        return session.skipped(task.title, WorkloadKind.SINGLE, prepared.too_long)
    kept = {**prepared.settings, "runs": settings.runs, "warm_ups": settings.warm_ups, "key": task.key}
    tally = session.open(WorkloadTally(task.title, WorkloadKind.SINGLE, kept, list(prepared.notes)))
    if settings.limit_s is not None and prepared.wanted.prompt_tokens > WARM_UP_PROMPT:
        tally.notes.append("no warm-up: with --limit, prompts of this length use the time for measured runs")
    else:
        for _ in range(settings.warm_ups):
            await warm_up(session, tally, prepared)
    for run in range(settings.runs):
        if tally.is_over(settings.limit_s, run, settings.runs):
            break
        ask = replace(prepared.ask(session.nonce()), ignore_eos=settings.ignore_eos)
        before = await session.drafts()
        tally.add(await session.send(ask), Role.COLD, run=run)
        tally.count_drafts(before, await session.drafts())
        tally.add(await session.send(ask), Role.WARM, run=run)
    return await session.close(tally)
