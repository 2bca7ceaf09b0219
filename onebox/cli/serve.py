"""`onebox serve`: a checkpoint behind the OpenAI API; without one, a tiny random model of the same architecture."""

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onebox.spec.errors import UsageError

if TYPE_CHECKING:
    from onebox.engine.api import Engine, EngineConfig
    from onebox.server.complete import Service
    from onebox.spec.model import ModelSpec

__all__ = ["serve"]

_RANDOM_NAME = "tiny-random"


@dataclass(frozen=True)
class _Options:
    """The command line, as given."""

    model: Path | None
    host: str
    port: int
    served_model_name: str | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_waiting: int


def serve(
    model: Annotated[
        Path | None, typer.Argument(help="Checkpoint directory. Without it: a tiny random model, for trying the API.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in the API; the directory's name unless told.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and answer together; the model's own limit unless told.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that are computed at once.")] = 8,
    max_num_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; beyond, clients get 429.")] = 64,
) -> None:
    """Serve a model on an OpenAI-compatible HTTP API."""
    # Until the server handles signals itself, SIGTERM is to end the process as SIGINT does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = _Options(model, host, port, served_model_name, max_model_len, max_num_seqs, max_num_waiting)
    with contextlib.suppress(KeyboardInterrupt):
        _serve(options)
    typer.echo("Stopped.")


def _serve(options: _Options) -> None:
    """Binds, loads, serves; the address comes first, so that a taken port is known before a model is loaded."""
    began = time.perf_counter()
    with _phase("import"):
        from onebox.server.app import create_app
        from onebox.server.run import bind, run
    with contextlib.closing(bind(options.host, options.port)) as bound:
        service = _load(options)
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"http://{host}:{bound.getsockname()[1]}/v1"

        def say_ready() -> None:
            typer.echo(f"Ready after {time.perf_counter() - began:.1f} s: {service.model_name} at {url}")

        with service.engine:
            run(create_app(service), bound, on_ready=say_ready, on_stop=service.engine.close)


def _load(options: _Options) -> "Service":
    from onebox.engine.api import EngineConfig
    from onebox.server.complete import Service
    from onebox.spec.model import read_config
    from onebox.text.chat import ChatTemplate
    from onebox.text.generation import GenerationDefaults
    from onebox.text.tokenizer import Tokenizer

    directory = options.model or _tiny_random()
    with _phase("config and tokenizer"):
        spec, defaults = read_config(directory), GenerationDefaults.load(directory)
        tokenizer, template = Tokenizer.load(directory), ChatTemplate.load(directory)
    max_model_len = _context(spec, options.max_model_len)
    config = EngineConfig(max_model_len, options.max_num_seqs, options.max_num_waiting, defaults.eos_token_ids)
    name = options.served_model_name or (directory.resolve().name if options.model else _RANDOM_NAME)
    return Service(_start_engine(directory, config), tokenizer, template, defaults, name)


def _tiny_random() -> Path:
    with _phase("tiny random model"):
        import torch

        from onebox.model.random import random_checkpoint

        # Its tensors are too small to share out: on a busy machine more threads would only wait for each other.
        torch.set_num_threads(1)
        directory = random_checkpoint()
    typer.echo(f"No model was given: {directory} has random weights, so its words mean nothing.")
    return directory


def _context(spec: "ModelSpec", asked: int | None) -> int:
    if asked is not None and asked > spec.max_position_embeddings:
        raise UsageError(f"--max-model-len is {asked}; the model's positions go up to {spec.max_position_embeddings}.")
    return asked or spec.max_position_embeddings


def _start_engine(directory: Path, config: "EngineConfig") -> "Engine":
    with _phase("weights"):
        from onebox.engine.api import Engine
        from onebox.engine.runner import ReferenceRunner
        from onebox.model.load import load_weights

        loaded = load_weights(directory)
    if loaded.num_skipped_vision_tensors:
        typer.echo(f"{loaded.num_skipped_vision_tensors} vision tensors stay on disk: images are not served yet.")
    typer.echo(str(config))
    return Engine(ReferenceRunner(loaded.spec, loaded.weights), config)


@contextlib.contextmanager
def _phase(name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    typer.echo(f"{name}: {time.perf_counter() - began:.2f} s")
