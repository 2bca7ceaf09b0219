"""A complete measurement: queries the server, runs the chosen workloads and creates the record.

An interruption (Ctrl-C) ends it early and keeps the workloads measured so far; the record is marked as incomplete.
"""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from onebox.bench.client import Client, Connection, server_address
from onebox.bench.launch import Launched, launched
from onebox.bench.load import Loop, run_load
from onebox.bench.machine import commit, gpu_memory_bytes, hardware, versions
from onebox.bench.meter import Meter
from onebox.bench.metrics import kv_tokens, memory_bytes, startup_seconds
from onebox.bench.record import Run, WorkloadRecord
from onebox.bench.session import BenchSettings, Session, Watch
from onebox.bench.single import run_single
from onebox.bench.sweep import Cell, run_cell
from onebox.bench.tasks import Task
from onebox.sensors import listening_process

__all__ = ["BenchPlan", "measure"]


@dataclass(frozen=True)
class BenchPlan:
    """What to measure, in this order."""

    connection: Connection
    settings: BenchSettings
    tasks: tuple[Task, ...] = ()
    loads: tuple[tuple[str, Loop], ...] = ()
    """Mixes and their loops."""
    cells: tuple[Cell, ...] = ()
    launch: str = ""
    launch_patience_s: float = 1800.0
    ladder: dict[str, Any] = field(default_factory=dict)
    """For the record of a rung: what it is and how it was measured."""

    @property
    def config(self) -> dict[str, Any]:
        """Settings for the record, without the API key."""
        return {
            "url": self.connection.url,
            "model": self.connection.model,
            "stall_s": self.connection.stall_s,
            "first_token_s": self.connection.first_token_s,
            "timeout_s": self.connection.timeout_s,
            **asdict(self.settings),
            "workloads": [task.key for task in self.tasks],
            "loads": [{"mix": mix, **asdict(loop)} for mix, loop in self.loads],
            "cells": [cell.name for cell in self.cells],
            "launch": self.launch,
            **({"ladder": self.ladder} if self.ladder else {}),
        }

    def parts(self, session: Session) -> Iterator[Callable[[], Awaitable[WorkloadRecord]]]:
        """The workloads to run, as callables."""
        yield from (partial(run_single, session, task) for task in self.tasks)
        yield from (partial(run_load, session, mix, loop) for mix, loop in self.loads)
        yield from (partial(run_cell, session, cell) for cell in self.cells)


async def measure(plan: BenchPlan, watch: Watch, command: tuple[str, ...]) -> Run:
    """Runs the plan. A server that cannot be queried raises; failed requests are results."""
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(_stopped_by_sigterm())
        server = None
        if plan.launch:
            starting = launched(plan.launch, plan.connection, plan.launch_patience_s)
            server = await stack.enter_async_context(starting)
        client = await stack.enter_async_context(Client(plan.connection))
        return await _measured(plan, Session(client, plan.settings, watch), command, server)


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Handles SIGTERM like Ctrl-C, so that a launched server is stopped and measured workloads are kept."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _measured(plan: BenchPlan, session: Session, command: tuple[str, ...], server: Launched | None) -> Run:
    began_at, client = time.perf_counter(), session.client
    run = Run(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        config=plan.config,
        versions=versions(),
        hardware=hardware(),
        server=await client.discover(),
        commit=commit(),
        notes=_notes(client),
    )
    meter = session.meter = _meter(plan, server) if run.server.is_local else None
    workloads: list[WorkloadRecord] = []
    is_interrupted = False
    try:
        async with meter.running(plan.settings.idle_s) if meter else contextlib.nullcontext():
            for part in plan.parts(session):
                # One at a time: an interruption keeps the completed ones.
                workloads += [await part()]
    except asyncio.CancelledError:
        is_interrupted = True
        if session.tally is not None:
            workloads.append(session.measured(session.tally))
    text = None if is_interrupted else await client.metrics()
    startup = startup_seconds(text) | (server.startup_s if server else {})
    memory = memory_bytes(text) | (gpu_memory_bytes() if run.server.is_local else {})
    if server:
        memory["resident"] = server.resident_bytes
    return replace(
        run,
        duration_s=time.perf_counter() - began_at,
        workloads=tuple(workloads),
        startup_s=startup,
        memory_bytes=memory,
        kv_tokens=kv_tokens(text),
        power=meter.power if meter else None,
        sensed=meter.sensed if meter else None,
        interrupted=is_interrupted,
    )


def _meter(plan: BenchPlan, server: Launched | None) -> Meter:
    """Sensors of this machine, and CPU time of the server: the one that was launched, or that listens on its port."""
    if server is not None:
        return Meter(server.process.pid)
    address = urlsplit(server_address(plan.connection.url))
    return Meter(listening_process(address.port or (443 if address.scheme == "https" else 80)))


def _notes(client: Client) -> tuple[str, ...]:
    notes = []
    if not client.server.tokenizer:
        notes.append("the server has no /tokenize: prompt lengths were found with one-token requests")
    if not client.server.gives_token_ids:
        notes.append("the server sends no token ids: tokens are counted from its usage, checked against the text")
    if "chat_template_kwargs" not in client.accepts:
        notes.append("the server does not accept chat_template_kwargs: thinking is the server's default")
    if client.server.max_model_len is None:
        notes.append("the server does not report its context: nothing was scaled down")
    return tuple(notes)
