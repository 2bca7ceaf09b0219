"""`onebox serve`: a checkpoint behind the OpenAI API; without one, the pocket model that ships with onebox.

The flags are those that people know from vLLM, so that a launch command works with the name replaced. What such a flag
has no meaning for here is said in one line when it is given, never silently.
"""

import contextlib
import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebox.spec.errors import UsageError

if TYPE_CHECKING:
    from onebox.engine.start import EngineOptions
    from onebox.engine.remote.messages import Progress
    from onebox.server.complete import Service
    from onebox.server.media import MediaLimits
    from onebox.server.settings import ServerSettings

__all__ = ["serve"]

_POCKET_NAME = "pocket"
_KV_NAMES = {"auto": "bf16", "bfloat16": "bf16", "fp8_e4m3": "fp8"}
_METHODS = {"qwen3_next_mtp": "mtp", "qwen3_5_mtp": "mtp"}
# Known flags without a meaning here, and why.
_NOTICES = {
    "trust_remote_code": "--trust-remote-code: no code is ever taken from a checkpoint.",
    "enable_auto_tool_choice": "--enable-auto-tool-choice: tool calls are always parsed when a request brings tools.",
    "tool_call_parser": "--tool-call-parser: the family has one form of tool calls, and it is parsed.",
    "reasoning_parser": "--reasoning-parser: the family has one form of reasoning, and it is parsed.",
    "tensor_parallel_size": "--tensor-parallel-size 1: onebox runs on one GPU.",
    "enforce_eager": "--enforce-eager: graphs are captured in seconds, so they are always used.",
    "enable_chunked_prefill": "--enable-chunked-prefill: prompts always share steps with running answers.",
}


@dataclass(frozen=True)
class _Options:
    """The command line, resolved as far as it can be without a checkpoint."""

    model: Path | None
    host: str
    port: int
    served_model_name: str | None
    chat_template: Path | None
    template_options: dict[str, Any]
    generation_overrides: dict[str, Any]
    shutdown_timeout: float
    engine: "EngineOptions"
    settings: "ServerSettings"
    media: "MediaLimits"


def serve(
    model: Annotated[
        Path | None, typer.Argument(help="Checkpoint directory. Without it: the pocket model, which ships with onebox.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in the API; the directory's name unless told.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="ONEBOX_API_KEY", help="Clients must send it; nobody needs one unless told.")
    ] = None,
    allowed_origins: Annotated[
        str, typer.Option(help='JSON list of origins whose pages may call the API; "*" for all. None unless told.')
    ] = "[]",
    device: Annotated[str, typer.Option(help="Where the model runs: auto, cuda or cpu.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="Activations: auto, bfloat16 or float32. Auto is bfloat16 where that is the faster.")
    ] = "auto",
    load_format: Annotated[
        str, typer.Option(help="How weights are read: auto, safetensors, fastsafetensors, or dummy (random weights).")
    ] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="KV cache: auto (bf16), bf16, fp8, turboquant, or turboquant_kXvY (X, Y of 8, 4, 3, 2).")
    ] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and answer together; the model's own limit unless told.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests that are computed at once.")] = 8,
    max_num_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; beyond, clients get 429.")] = 64,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(help="Prompt tokens computed in one step, a multiple of 64; 2048 on a GPU, 512 on a CPU."),
    ] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the memory that onebox may use.")] = 0.9,
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(help="Bytes for KV pages and cached prefixes; all that is left on a GPU, 1 GiB on a CPU."),
    ] = None,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Keep the states of prompts, so that what was computed once is not computed again.")
    ] = True,
    language_model_only: Annotated[
        bool, typer.Option("--language-model-only", help="Leave the vision tower on disk; images are then refused.")
    ] = False,
    limit_mm_per_prompt: Annotated[
        str, typer.Option(help='JSON of what one request may hold; {"image": 16, "video": 2} unless told.')
    ] = "{}",
    allowed_local_media_path: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Directory whose files requests may show by file: URLs."),
    ] = None,
    allow_private_media: Annotated[
        bool, typer.Option("--allow-private-media", help="Also fetch images from private and loopback addresses.")
    ] = False,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help='JSON: {"method": "none|mtp|ngram|auto", "num_speculative_tokens": 1..8}. '
            "Auto, up to 4 drafts, where the checkpoint has an MTP head."
        ),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A jinja file in place of the checkpoint's own chat template.")
    ] = None,
    default_chat_template_kwargs: Annotated[
        str, typer.Option(help='JSON for the template where a request is silent, such as {"enable_thinking": false}.')
    ] = "{}",
    override_generation_config: Annotated[
        str, typer.Option(help='JSON of sampling defaults over generation_config.json, such as {"temperature": 0.6}.')
    ] = "{}",
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests may take after SIGTERM; a second one stops.")
    ] = 30.0,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", hidden=True)] = False,
    enable_auto_tool_choice: Annotated[bool, typer.Option("--enable-auto-tool-choice", hidden=True)] = False,
    tool_call_parser: Annotated[str | None, typer.Option(hidden=True)] = None,
    reasoning_parser: Annotated[str | None, typer.Option(hidden=True)] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(hidden=True)] = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", hidden=True)] = False,
    enable_chunked_prefill: Annotated[bool | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve a model on an OpenAI-compatible HTTP API."""
    from onebox.engine.start import EngineOptions
    from onebox.server.fetch import FetchLimits
    from onebox.server.media import MediaLimits
    from onebox.server.settings import ServerSettings

    given = locals()
    for name, notice in _NOTICES.items():
        if given[name]:
            typer.echo(notice)
    if tensor_parallel_size not in (None, 1):
        raise UsageError(f"--tensor-parallel-size is {tensor_parallel_size}; onebox runs on one GPU.")
    method, drafts = _speculation(speculative_config)
    engine = EngineOptions(
        device=device,
        dtype=dtype,
        load_format=load_format,
        kv_cache_dtype=_KV_NAMES.get(kv_cache_dtype, kv_cache_dtype),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_waiting=max_num_waiting,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        enable_prefix_caching=enable_prefix_caching,
        language_model_only=language_model_only,
        speculation=method,
        num_speculative_tokens=drafts,
    )
    origins = _json("--allowed-origins", allowed_origins, list)
    options = _Options(
        model=model,
        host=host,
        port=port,
        served_model_name=served_model_name,
        chat_template=chat_template,
        template_options=_json("--default-chat-template-kwargs", default_chat_template_kwargs, dict),
        generation_overrides=_json("--override-generation-config", override_generation_config, dict),
        shutdown_timeout=shutdown_timeout,
        engine=engine,
        settings=ServerSettings(api_key=api_key, allowed_origins=tuple(origins)),
        media=MediaLimits.of_counts(
            _json("--limit-mm-per-prompt", limit_mm_per_prompt, dict),
            FetchLimits(local_path=allowed_local_media_path, allows_private=allow_private_media),
        ),
    )
    # Until the server handles signals itself, SIGTERM is to end the process as SIGINT does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        _serve(options)
    typer.echo("Stopped.")


def _json(flag: str, text: str, kind: type) -> Any:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{flag} is not JSON ({error}).") from None
    if not isinstance(given, kind):
        raise UsageError(f"{flag} must be a JSON {'object' if kind is dict else 'list'}, not {text}.")
    return given


def _speculation(text: str | None) -> tuple[str | None, int | None]:
    """(method, drafts) of --speculative-config; None where it leaves the choice open."""
    given = _json("--speculative-config", text or "{}", dict)
    unknown = given.keys() - {"method", "num_speculative_tokens"}
    if unknown:
        raise UsageError(
            f"--speculative-config holds {sorted(unknown)[0]!r}; it takes method and num_speculative_tokens."
        )
    method, drafts = given.get("method"), given.get("num_speculative_tokens")
    if drafts is not None and (not isinstance(drafts, int) or isinstance(drafts, bool)):
        raise UsageError(f"num_speculative_tokens is {drafts!r}; it must be a whole number.")
    return _METHODS.get(method, method), drafts


def _serve(options: _Options) -> None:
    """Binds, loads, serves; the address comes first, so that a taken port is known before a model is loaded."""
    began = time.perf_counter()
    from onebox.server.app import create_app
    from onebox.server.run import bind, run

    with contextlib.closing(bind(options.host, options.port)) as bound:
        service = _load(options)
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"http://{host}:{bound.getsockname()[1]}"

        def say_ready() -> None:
            typer.echo(
                f"Ready after {time.perf_counter() - began:.1f} s: {service.model_name} at {url}/v1, page at {url}/"
            )

        with service.engine:
            app = create_app(service, options.settings)
            run(app, bound, on_ready=say_ready, on_stop=service.engine.close, drain_s=options.shutdown_timeout)


def _load(options: _Options) -> "Service":
    """The text side of the checkpoint, and its engine in a process of its own, loaded and warm."""
    from onebox.engine.start import CheckpointStarter
    from onebox.engine.start import TokenInfo
    from onebox.engine.remote.parent import EngineProcess
    from onebox.engine.remote.messages import StartPhase
    from onebox.server.complete import Service
    from onebox.server.media import Media
    from onebox.text.chat import ChatTemplate
    from onebox.text.generation import GenerationDefaults
    from onebox.text.tokenizer import Tokenizer
    from onebox.text.vocabulary import token_table

    directory = options.model or _pocket()
    began = time.perf_counter()
    defaults = GenerationDefaults.load(directory).overridden(options.generation_overrides)
    tokenizer = Tokenizer.load(directory)
    template = ChatTemplate.load(directory, options.chat_template)
    vocabulary = TokenInfo(
        defaults.eos_token_ids, tokenizer.message_token_ids, token_table(tokenizer, defaults.eos_token_ids)
    )
    phases = {"config and tokenizer": time.perf_counter() - began}
    typer.echo(f"config and tokenizer: {phases['config and tokenizer']:.2f} s")

    def say(progress: "Progress") -> None:
        if isinstance(progress, StartPhase):
            phases.setdefault(progress.name, progress.seconds)
        _say(progress)

    # The pocket model's tensors are too small to share out: more threads would only wait for each other.
    opening = CheckpointStarter(directory, options.engine, vocabulary, num_threads=None if options.model else 1)
    engine = EngineProcess(opening, say)
    try:
        engine.wait_ready()
    except BaseException:
        engine.close()
        raise
    name = options.served_model_name or (directory.resolve().name if options.model else _POCKET_NAME)
    media = Media.open(directory, options.media, has_tower=engine.planned.memory.request.with_vision)
    memory = {part.name: part.bytes for part in engine.planned.memory.parts}
    return Service(
        engine,
        tokenizer,
        template,
        defaults,
        name,
        template_options=options.template_options,
        memory_bytes=memory,
        startup_s=phases,
        media=media,
    )


def _pocket() -> Path:
    from onebox.pocket.ready import pocket_checkpoint

    began = time.perf_counter()
    directory = pocket_checkpoint()
    typer.echo(f"No model was given: {directory} is the pocket model, ready after {time.perf_counter() - began:.2f} s.")
    return directory


def _say(progress: "Progress") -> None:
    """A phase with its seconds, or the memory that was planned and what was resolved."""
    from onebox.engine.remote.messages import StartPhase

    if isinstance(progress, StartPhase):
        typer.echo(f"{progress.name}: {progress.seconds:.2f} s")
        return
    memory = progress.memory
    typer.echo(f"{memory.box.device}, {progress.dtype} activations, {memory.request.kv.name} KV cache:")
    for part in memory.parts:
        typer.echo(f"  {part.name:<13}{part.bytes / 2**30:9.3f} GiB  {part.note}")
    typer.echo(str(progress.config))
