"""The options of `onebox serve` by topic, and their conversion to engine and server settings.

Names are those of vLLM, so that a launch command works with the program's name replaced (`launch_line.py`).
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onebox.cli.options import json_option, option_group
from onebox.cli.shared_options import (
    DraftVocab,
    HfOverrides,
    KVCacheDtype,
    LanguageModelOnly,
    LMHead,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MemoryUtilization,
    MtpFormat,
    StateCacheDtype,
    chosen_utilization,
)
from onebox.cli.vllm_flags import own_kv_name
from onebox.spec.addresses import is_loopback
from onebox.spec.errors import UsageError

if TYPE_CHECKING:
    from onebox.engine.api import EngineOptions
    from onebox.server.keys import ApiKey
    from onebox.server.media import MediaLimits
    from onebox.server.settings import ServerSettings, TlsFiles

__all__ = [
    "HttpOptions",
    "MediaOptions",
    "MemoryOptions",
    "ModelOptions",
    "PromptOptions",
    "engine_options",
]

_KEY_VARIABLE = "ONEBOX_API_KEY"
_METHODS = {"qwen3_next_mtp": "mtp", "qwen3_5_mtp": "mtp"}


@option_group("HTTP")
class HttpOptions:
    """Address and access control."""

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 selects a free port.")] = 8000
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="A further port that answers GET /metrics without an API key, and nothing else; 0 selects a free one. "
            "It speaks HTTPS where the API does.",
        ),
    ] = None
    metrics_host: Annotated[str | None, typer.Option(help="Address of that port; default: that of --host.")] = None
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="The model's name in the API; default: the directory's name. May be given several times: the first is "
            "the one in answers."
        ),
    ] = None
    model_aliases: Annotated[
        str,
        typer.Option(
            help="JSON list of further names that clients may ask for, with * for any text: agents ask for their own "
            "models unless told otherwise. [] for none."
        ),
    ] = '["claude-*", "gpt-*"]'
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar=_KEY_VARIABLE, help="API key that clients must send; may be given several times."),
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File of API keys: one a line; or .toml or .json, where each has a name, a priority and a share of "
            "the queue."
        ),
    ] = None
    allow_open_server: Annotated[
        bool, typer.Option("--allow-open-server", help="Listen beyond this machine without an API key.")
    ] = False
    allowed_hosts: Annotated[
        str,
        typer.Option(
            help="JSON list of host names by which clients may call, beside addresses and this machine's own names; "
            '["*"] for all. With an API key all are allowed unless given.'
        ),
    ] = "[]"
    allowed_origins: Annotated[
        str, typer.Option(help='JSON list of origins whose pages may call the API, such as ["*"] for all.')
    ] = "[]"
    ssl_certfile: Annotated[
        Path | None, typer.Option(help="Certificate in PEM: the server then speaks HTTPS alone.")
    ] = None
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its key; default: in the certificate's file.")] = None
    ssl_ca_certs: Annotated[
        Path | None, typer.Option(help="Authorities of which a client must show a certificate.")
    ] = None
    root_path: Annotated[
        str, typer.Option(help="Prefix of all paths behind a reverse proxy that passes it on, such as /onebox.")
    ] = ""
    idle_release: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Seconds without a request after which the engine frees the device's memory; the next request starts "
            "it again and waits. 0: never.",
        ),
    ] = 0.0
    responses_bytes: Annotated[
        int,
        typer.Option(
            min=0,
            help="Bytes of answers of the Responses API that are kept for previous_response_id; the oldest go first, 0 "
            "keeps none.",
        ),
    ] = 64 << 20
    responses_max_age: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Seconds after which such an answer is forgotten.")
    ] = 7 * 86400.0
    responses_dir: Annotated[
        Path | None, typer.Option(help="Directory in which they are kept, also over a restart; default: in memory.")
    ] = None
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Seconds for running requests to finish after SIGTERM; a second SIGTERM stops at once.",
        ),
    ] = 30.0

    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Where OpenTelemetry traces of requests are sent, such as grpc://localhost:4317 or "
            "http://localhost:4318/v1/traces; needs onebox[otel]. Default: as OTEL_* variables say."
        ),
    ] = None
    disable_log_stats: Annotated[
        bool, typer.Option("--disable-log-stats", help="Do not print speeds while serving.")
    ] = False
    log_stats_interval: Annotated[
        float,
        typer.Option(
            min=0.1, metavar="SECONDS", help="Seconds between two lines of speeds; nothing is printed when idle."
        ),
    ] = 10.0

    def settings(self) -> "ServerSettings":
        from onebox.server.response_store import StoreLimits
        from onebox.server.settings import ServerSettings

        return ServerSettings(
            api_keys=self._keys(),
            responses=StoreLimits(max_bytes=self.responses_bytes, max_age_s=self.responses_max_age),
            responses_dir=self.responses_dir,
            root_path=_root_path(self.root_path),
            allowed_hosts=_names("--allowed-hosts", self.allowed_hosts),
            allowed_origins=_names("--allowed-origins", self.allowed_origins),
        )

    def tls(self) -> "TlsFiles | None":
        from onebox.server.settings import TlsFiles

        if self.ssl_certfile is None:
            if self.ssl_keyfile or self.ssl_ca_certs:
                raise UsageError("--ssl-keyfile and --ssl-ca-certs go with --ssl-certfile; give the certificate too.")
            return None
        return TlsFiles(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)

    def metrics_address(self) -> tuple[str, int] | None:
        """(host, port) for scrapers, if there is one."""
        if self.metrics_port is None:
            if self.metrics_host is not None:
                raise UsageError("--metrics-host goes with --metrics-port; give the port too.")
            return None
        if self.metrics_port and self.metrics_port == self.port:
            raise UsageError(
                f"--metrics-port {self.metrics_port} is the API's own port, where /metrics needs the API key like the "
                "rest; choose another."
            )
        return self.metrics_host or self.host, self.metrics_port

    def aliases(self) -> tuple[str, ...]:
        """Names beside the first."""
        return (*(self.served_model_name or [])[1:], *_names("--model-aliases", self.model_aliases))

    def _keys(self) -> "tuple[ApiKey, ...]":
        """Refuses empty keys, and an open server beyond this machine unless it is asked for."""
        from onebox.server.keys import plain_keys, read_key_file, unique_keys

        if not os.environ.get(_KEY_VARIABLE, "set").strip():
            raise UsageError(f"{_KEY_VARIABLE} is empty, which would leave the server open; set a key, or unset it.")
        keys = plain_keys(self.api_key or [])
        keys += read_key_file(self.api_key_file) if self.api_key_file else []
        if not keys and not self.allow_open_server and not is_loopback(self.host):
            raise UsageError(
                f"--host {self.host} lets other machines call this server, and it has no API key; set one with "
                "--api-key or --api-key-file, or allow everybody with --allow-open-server."
            )
        return unique_keys(keys)


@option_group("Model")
class ModelOptions:
    """How the model is loaded and computed."""

    device: Annotated[str, typer.Option(help="Where the model runs: auto, cuda or cpu.")] = "auto"
    dtype: Annotated[
        str, typer.Option(help="Activations: auto, bfloat16 or float32. Auto is bfloat16 where that is faster.")
    ] = "auto"
    load_format: Annotated[
        str, typer.Option(help="How weights are read: auto, safetensors, fastsafetensors, or dummy (random weights).")
    ] = "auto"
    lm_head: LMHead = "keep"
    mtp_format: MtpFormat = "keep"
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help='JSON: {"method": "none|mtp|ngram|dflash|auto", "num_speculative_tokens": 1..15, "model": DIR}. '
            "Default: auto with up to 4 drafts where the checkpoint has an MTP head. dflash, and auto too, drafts with "
            "the DFlash drafter in DIR."
        ),
    ] = None
    draft_vocab: DraftVocab = "auto"
    hf_overrides: HfOverrides = "{}"

    def overrides(self) -> dict[str, Any]:
        given: dict[str, Any] = json_option("--hf-overrides", self.hf_overrides, dict)
        return given

    def speculation(self) -> tuple[str | None, int | None, str | None]:
        """(method, drafts, drafter's directory) of --speculative-config; None for values it does not set."""
        given = json_option("--speculative-config", self.speculative_config or "{}", dict)
        unknown = given.keys() - {"method", "model", "num_speculative_tokens"}
        if unknown:
            raise UsageError(
                f"--speculative-config holds {sorted(unknown)[0]!r}; it takes method, num_speculative_tokens and model."
            )
        method, drafts, drafter = (given.get(name) for name in ("method", "num_speculative_tokens", "model"))
        if drafter is not None and (not isinstance(drafter, str) or method not in ("dflash", "auto")):
            raise UsageError(
                f"--speculative-config names the model {drafter!r}; that is the directory of a DFlash drafter, for the "
                "method dflash or auto. Other drafts come from the MTP head of the served checkpoint: leave it out, or "
                "build a checkpoint with another head: `onebox build --mtp-from`."
            )
        if drafts is not None and (not isinstance(drafts, int) or isinstance(drafts, bool)):
            raise UsageError(f"num_speculative_tokens is {drafts!r}; it must be a whole number.")
        return _METHODS.get(method, method), drafts, drafter


@option_group("Memory and scheduling")
class MemoryOptions:
    """Memory and batch limits; names match `EngineOptions`."""

    kv_cache_dtype: KVCacheDtype = "auto"
    mamba_ssm_cache_dtype: StateCacheDtype = "auto"
    max_model_len: MaxModelLen = None
    max_num_seqs: MaxNumSeqs = 8
    max_num_waiting: Annotated[int, typer.Option(min=0, help="Maximum queued requests; further requests get 429.")] = 64
    max_num_batched_tokens: MaxNumBatchedTokens = None
    gpu_memory_utilization: MemoryUtilization = None
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes for KV pages and cached prefixes; default: all remaining memory on a GPU, 1 GiB on a CPU."
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(help="Cache prompts (KV pages, DeltaNet states), so that shared prefixes are not recomputed."),
    ] = True
    prefix_dir: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="Directory that keeps cached prefixes through eviction and restarts; auto: in the user's cache "
            "directory; none: in memory only.",
        ),
    ] = "none"
    prefix_disk_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Bytes that the prefix directory may hold, such as 200G; default: 200 GB."),
    ] = None


@option_group("Images and video")
class MediaOptions:
    """Limits on images and videos in requests."""

    language_model_only: LanguageModelOnly = False
    limit_mm_per_prompt: Annotated[
        str, typer.Option(help='JSON with the limits per request; default: {"image": 16, "video": 2}.')
    ] = "{}"
    allowed_local_media_path: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Directory whose files requests may reference by file: URLs."),
    ] = None
    allow_private_media: Annotated[
        bool, typer.Option("--allow-private-media", help="Also fetch images from private and loopback addresses.")
    ] = False

    def limits(self) -> "MediaLimits":
        from onebox.server.fetch import FetchLimits
        from onebox.server.media import MediaLimits

        return MediaLimits.of_counts(
            json_option("--limit-mm-per-prompt", self.limit_mm_per_prompt, dict),
            FetchLimits(local_path=self.allowed_local_media_path, allows_private=self.allow_private_media),
        )


@option_group("Chat template and sampling")
class PromptOptions:
    """Chat template and default sampling parameters."""

    chat_template: Annotated[
        Path | None, typer.Option(help="A jinja file that replaces the checkpoint's chat template.")
    ] = None
    default_chat_template_kwargs: Annotated[
        str, typer.Option(help='JSON of template variables that a request may override: {"enable_thinking": false}.')
    ] = "{}"
    generation_config: Annotated[
        str,
        typer.Option(
            help="Where sampling defaults come from: auto (the checkpoint's generation_config.json), vllm (neutral "
            "ones), or a directory with that file."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        str,
        typer.Option(
            help='JSON of sampling defaults that override generation_config.json, such as {"temperature": 0.6}.'
        ),
    ] = "{}"

    def template_kwargs(self) -> dict[str, Any]:
        given: dict[str, Any] = json_option("--default-chat-template-kwargs", self.default_chat_template_kwargs, dict)
        return given

    def generation_overrides(self) -> dict[str, Any]:
        given: dict[str, Any] = json_option("--override-generation-config", self.override_generation_config, dict)
        return given


def engine_options(model: ModelOptions, memory: MemoryOptions, media: MediaOptions) -> "EngineOptions":
    """The engine's options."""
    from onebox.engine.api import EngineOptions, prefix_disk

    method, drafts, drafter = model.speculation()
    options = EngineOptions(
        device=model.device,
        dtype=model.dtype,
        load_format=model.load_format,
        lm_head=model.lm_head,
        mtp_format=model.mtp_format,
        language_model_only=media.language_model_only,
        speculation=method,
        num_speculative_tokens=drafts,
        draft_model=_drafter_directory(drafter) if drafter else None,
        draft_vocab=model.draft_vocab,
        hf_overrides=model.overrides(),
        **vars(memory)
        | {
            "kv_cache_dtype": own_kv_name(memory.kv_cache_dtype),
            "gpu_memory_utilization": chosen_utilization(memory.gpu_memory_utilization),
        },
    )
    prefix_disk(options)  # refuses a directory that cannot be used, before anything is loaded
    return options


def _drafter_directory(source: str) -> Path:
    """The drafter's directory: a path, or a repository that is on this machine."""
    from onebox.checkpoint.hub import find_source

    found = find_source(source)
    if found is None or not found.is_dir():
        raise UsageError(
            f"--speculative-config names the drafter {source!r}, which is not on this machine: give its directory, or "
            f"bring it here first with `onebox pull {source}`."
        )
    return found


def _names(flag: str, text: str) -> tuple[str, ...]:
    names = json_option(flag, text, list)
    wrong = next((name for name in names if not isinstance(name, str) or not name.strip()), None)
    if wrong is not None:
        raise UsageError(f"{flag} holds {wrong!r}; it takes names as text.")
    return tuple(names)


def _root_path(text: str) -> str:
    stripped = text.rstrip("/")
    if stripped and not stripped.startswith("/"):
        raise UsageError(f"--root-path {text} must begin with a slash.")
    return stripped
