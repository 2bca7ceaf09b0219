"""`onebox serve`: serves a checkpoint with the OpenAI API; without one, the pocket model that ships with onebox.

A launch line of `vllm serve` works with the program's name replaced (`launch_line.py`).
"""

import contextlib
import hashlib
import json
import signal
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebox.cli.log_options import LogOptions
from onebox.cli.options import grouped
from onebox.cli.serve_options import (
    HttpOptions,
    MediaOptions,
    MemoryOptions,
    ModelOptions,
    PromptOptions,
    engine_options,
)
from onebox.cli.settings import configurable
from onebox.cli.start_view import progress_lines
from onebox.engine.remote.spawn import EarlyProcess
from onebox.spec.heap import bound_heap
from onebox.spec.output import end_process, flush_output, log_in_background, say
from onebox.spec.places import remember_place
from onebox.spec.running import registered

if TYPE_CHECKING:
    from onebox.engine.api import EngineOptions, EngineProcess, Progress
    from onebox.server.media import MediaLimits
    from onebox.server.service import Service
    from onebox.server.settings import ServerSettings
    from onebox.text.chat import ChatTemplate
    from onebox.text.generation import GenerationDefaults

__all__ = ["serve"]

_DETAIL_S = 1.0
"""Between two lines that say how far a phase is."""
_POCKET_NAME = "pocket"


@dataclass(frozen=True)
class _Options:
    """The command line, resolved as far as possible without a checkpoint."""

    model: Path | None
    http: HttpOptions
    engine: "EngineOptions"
    settings: "ServerSettings"
    chat_template: Path | None
    template_options: dict[str, Any]
    generation_config: str
    generation_overrides: dict[str, Any]
    media: "MediaLimits"


@configurable
@grouped
def serve(
    http: HttpOptions,
    logs: LogOptions,
    model_options: ModelOptions,
    memory: MemoryOptions,
    media: MediaOptions,
    prompts: PromptOptions,
    model: Annotated[
        Path | None,
        typer.Argument(
            help="Checkpoint directory, or owner/name on the hub. Without it: the pocket model that ships with onebox."
        ),
    ] = None,
) -> None:
    """Serve a model on an OpenAI-compatible HTTP API."""
    bound_heap(maps_large_blocks=True)
    # The engine's process imports torch while this one reads its options, imports a server and reads the tokenizer.
    with EarlyProcess(model_options.device, logs.style()) as early:
        options = _Options(
            model=model,
            http=http,
            engine=engine_options(model_options, memory, media),
            settings=logs.applied_to(http.settings()),
            chat_template=prompts.chat_template,
            template_options=prompts.template_kwargs(),
            generation_config=prompts.generation_config,
            generation_overrides=prompts.generation_overrides(),
            media=media.limits(),
        )
        # Until the server handles signals itself, SIGTERM ends the process like SIGINT.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        log_in_background(logs.style())
        _run(options, early)


def _run(options: _Options, early: EarlyProcess) -> None:
    """Serves to the end, which is that of this process."""
    try:
        status = _serve(options, early)
    except KeyboardInterrupt:
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, signal.SIG_IGN)
        status = 0
    except BaseException:
        flush_output()
        raise
    say("Stopped.")
    # Threads that hang, such as one that waits for a name server, must not keep the process.
    end_process(status)


def _serve(options: _Options, early: EarlyProcess) -> int:
    """Binds, loads, serves; binds first, so that a port in use is reported before a model is loaded."""
    from onebox.server.activity import ActivityLog
    from onebox.server.app import create_app
    from onebox.server.keys import callers_of
    from onebox.server.manager import tell_manager
    from onebox.server.run import bind, run
    from onebox.server.tracing import open_traces

    tls = options.http.tls()
    context = tls.context() if tls else None
    metrics = options.http.metrics_address()
    traces = open_traces(options.http.otlp_traces_endpoint)
    with contextlib.ExitStack() as closing:
        sockets = [closing.enter_context(bind(options.http.host, options.http.port))]
        url = _url(options.http.host, sockets[0], is_tls=tls is not None)
        settings, metrics_line = options.settings, ""
        if metrics:
            sockets.append(closing.enter_context(bind(*metrics, "--metrics-port")))
            settings = replace(settings, metrics_port=sockets[1].getsockname()[1])
            metrics_line = f", metrics for everybody at {_url(metrics[0], sockets[1], is_tls=tls is not None)}/metrics"
        service, engine = _load(options, early)

        keys = ", ".join(f"{key.name} ({key.max_share:.2g})" for key in callers_of(options.settings.api_keys))
        if len(options.settings.api_keys) > 1:
            say(f"API keys and their shares of the places for requests: {keys}.")

        def say_ready() -> None:
            tell_manager("READY=1")
            seconds = time.perf_counter() - early.began
            say(f"Ready after {seconds:.1f} s: {service.model_name} at {url}/v1, page at {url}/{metrics_line}")

        activity = ActivityLog(
            engine,
            options.http.log_stats_interval,
            is_quiet=options.http.disable_log_stats,
            judges_head=options.engine.load_format != "dummy",
        )
        if traces:
            closing.callback(traces.close)
        with engine, activity, _record(options, service, url):
            app = create_app(service, settings, traces)
            drain_s, limits = options.http.shutdown_timeout, settings.connections
            return run(
                app, sockets, say_ready, engine.close, drain_s, engine.wait_failed, limits, engine.close_s, context
            )


def _url(host: str, bound: socket.socket, *, is_tls: bool) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{shown}:{bound.getsockname()[1]}"


def _record(options: _Options, service: "Service", url: str) -> contextlib.AbstractContextManager[None]:
    """What `onebox ps` shows of this server, and `onebox list` of its checkpoint."""
    from onebox.checkpoint.hub import resolve_source

    directory = resolve_source(options.model).resolve() if options.model else None
    if directory is not None:
        remember_place(directory)
    planned = sum(size for name, size in service.memory_bytes.items() if name not in ("reserve", "unused"))
    return registered(service.model_name, str(directory or _POCKET_NAME), url, planned)


def _load(options: _Options, early: EarlyProcess) -> "tuple[Service, EngineProcess]":
    """The checkpoint's tokenizer and template, and its engine in a separate process, loaded and warmed up."""
    from onebox.checkpoint.hub import model_name, resolve_source
    from onebox.engine.api import CheckpointStarter, EngineProcess, StartDetail, StartPhase, TokenInfo
    from onebox.server.media import Media
    from onebox.server.service import Service
    from onebox.text.chat import ChatTemplate
    from onebox.text.generation import GenerationDefaults
    from onebox.text.tokenizer import Tokenizer
    from onebox.text.vocabulary import token_table

    directory = resolve_source(options.model) if options.model else _pocket()
    began = time.perf_counter()
    _check_side_files(directory, options)
    defaults = GenerationDefaults.load(directory, options.generation_config)
    defaults = defaults.overridden(options.generation_overrides)
    tokenizer = Tokenizer.load(directory)
    template = ChatTemplate.load(directory, options.chat_template)
    template.check_options(options.template_options)
    tokens = TokenInfo(
        defaults.eos_token_ids,
        tokenizer.message_token_ids,
        token_table(tokenizer, defaults.eos_token_ids),
        tokenizer.added_token_ids,
        tokenizer.thinking_token_ids,
    )
    phases = {"config and tokenizer": time.perf_counter() - began}
    say(f"config and tokenizer: {phases['config and tokenizer']:.2f} s")

    last_detail = time.perf_counter()

    def take(progress: "Progress") -> None:
        nonlocal last_detail
        if isinstance(progress, StartPhase):
            phases.setdefault(progress.name, progress.seconds)
        if isinstance(progress, StartDetail):
            if time.perf_counter() - last_detail < _DETAIL_S:
                return
            last_detail = time.perf_counter()
        for line in progress_lines(progress):
            say(line)

    # The pocket model's tensors are too small for multiple threads, which would only wait for each other.
    starter = CheckpointStarter(directory, options.engine, tokens, num_threads=None if options.model else 1)
    engine = EngineProcess(starter, take, idle_release_s=options.http.idle_release or None, early=early)
    try:
        engine.wait_ready()
    except BaseException:
        engine.close()
        raise
    own_name = model_name(options.model) if options.model else _POCKET_NAME
    media = Media.open(directory, options.media, has_tower=engine.planned.memory.request.with_vision)
    memory = {part.name: part.bytes for part in engine.planned.memory.parts}
    service = Service(
        engine,
        tokenizer,
        template,
        defaults,
        (options.http.served_model_name or [own_name])[0],
        aliases=options.http.aliases(),
        template_options=options.template_options,
        memory_bytes=memory,
        startup_s=phases,
        media=media,
        fingerprint=_fingerprint(engine.planned.fingerprint, directory, template, defaults, options.template_options),
    )
    return service, engine


def _fingerprint(
    model: str,
    directory: Path,
    template: "ChatTemplate",
    defaults: "GenerationDefaults",
    template_options: dict[str, Any],
) -> str:
    """Of all that decides an answer beside onebox itself; `model` is the engine's part."""
    digest = hashlib.sha256((directory / "tokenizer.json").read_bytes())
    for part in (model, template.source, repr(defaults), json.dumps(template_options, sort_keys=True)):
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()


def _pocket() -> Path:
    from onebox.pocket.ready import pocket_checkpoint

    began = time.perf_counter()
    directory = pocket_checkpoint()
    say(f"No model was given: {directory} is the pocket model, ready after {time.perf_counter() - began:.2f} s.")
    return directory


def _check_side_files(directory: Path, options: _Options) -> None:
    """Refuses a checkpoint that cannot be served for lack of a file, and says what it cannot do for lack of others."""
    from onebox.checkpoint.side_files import side_file_problems
    from onebox.spec.errors import UnreadableError
    from onebox.spec.model import read_config

    problems = side_file_problems(
        directory,
        read_config(directory),
        has_tower=not options.engine.language_model_only,
        has_template=options.chat_template is not None,
    )
    for problem in problems:
        if problem.is_fatal:
            raise UnreadableError(f"{directory} cannot be served: {problem.message}")
        say(problem.message)
