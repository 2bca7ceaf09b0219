"""Options of `onebox serve` as vLLM's: most have the same name and meaning; what has no counterpart is said.

Any other flag is vLLM's own and is passed as it is.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from onebox.spec.addresses import is_loopback
from onebox.spec.errors import UsageError

__all__ = ["NO_COUNTERPART", "SAME", "TRANSLATED", "ServeFlags", "map_flags", "refuse_open_server"]

SAME = frozenset(
    {
        "port",
        "served-model-name",
        "load-format",
        "dtype",
        "hf-overrides",
        "mamba-ssm-cache-dtype",
        "max-model-len",
        "max-num-seqs",
        "max-num-batched-tokens",
        "gpu-memory-utilization",
        "kv-cache-memory-bytes",
        "enable-prefix-caching",
        "no-enable-prefix-caching",
        "language-model-only",
        "limit-mm-per-prompt",
        "allowed-local-media-path",
        "chat-template",
        "default-chat-template-kwargs",
        "generation-config",
        "override-generation-config",
        "allowed-origins",
        "disable-log-stats",
        "max-log-len",
        "otlp-traces-endpoint",
        "ssl-certfile",
        "ssl-keyfile",
        "ssl-ca-certs",
        "root-path",
        "shutdown-timeout",
    }
)
"""The same name and meaning in vLLM."""
TRANSLATED = frozenset(
    {"host", "api-key", "allow-open-server", "disable-log-requests", "kv-cache-dtype", "speculative-config"}
)
NO_COUNTERPART = {
    "config": "the file has names of onebox, and vLLM reads YAML with its own; write the options out",
    "max-num-waiting": "vLLM queues without a limit",
    "prefix-dir": "prefixes on disk need a connector of vLLM's (--kv-transfer-config); in memory they are cached",
    "prefix-disk-bytes": "see prefix-dir",
    "api-key-file": "vLLM has one kind of key; give --api-key",
    "metrics-port": "vLLM has /metrics on the API's port, without a key",
    "metrics-host": "see metrics-port",
    "allowed-hosts": "vLLM does not check host names; put a reverse proxy in front",
    "allow-private-media": "vLLM fetches pictures from any address unless --allowed-media-domains is given",
    "device": "vLLM takes the device that it was built for",
    "lm-head": "vLLM does not convert while loading; build it: onebox build --lm-head int8",
    "mtp-format": "vLLM does not convert while loading; build it: onebox build --mtp int4",
    "draft-vocab": "vLLM drafts from the whole vocabulary",
    "idle-release": "vLLM has a sleep mode of its own: --enable-sleep-mode, POST /sleep and /wake_up",
    "responses-bytes": "vLLM keeps responses without a limit, with VLLM_ENABLE_RESPONSES_API_STORE=1",
    "responses-max-age": "see responses-bytes",
    "responses-dir": "vLLM keeps responses in memory",
    "model-aliases": "vLLM knows whole names alone; give --served-model-name several",
    "log-level": "vLLM's own log has VLLM_LOGGING_LEVEL, uvicorn's --uvicorn-log-level",
    "log-format": "vLLM writes text; VLLM_LOGGING_CONFIG_PATH configures Python's logging",
    "log-stats-interval": "vLLM prints every 10 seconds; VLLM_LOG_STATS_INTERVAL changes it",
}
"""Options of `onebox serve` without an equal in vLLM, and why."""
_OURS_ALONE = {
    "tensor-parallel-size": "--tp",
    "pipeline-parallel-size": "--pp",
    "nnodes": "--hosts",
    "node-rank": "--hosts",
    "master-addr": "--hosts",
    "master-port": "--master-port",
    "headless": "--hosts",
    "distributed-executor-backend": "the launch, which uses mp",
}
_SHORT = {"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-n": "nnodes", "-r": "node-rank"}
_KV_NAMES = {
    "auto": "auto",
    "bf16": "bfloat16",
    "fp8": "fp8",
    "turboquant": "turboquant_4bit_nc",
    "turboquant_k8v4": "turboquant_k8v4",
    "turboquant_k4v4": "turboquant_4bit_nc",
    "turboquant_k3v4": "turboquant_k3v4_nc",
    "turboquant_k3v3": "turboquant_3bit_nc",
}
_PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder", "--reasoning-parser", "qwen3")


@dataclass
class ServeFlags:
    """The words of vLLM for every rank and for the head alone, and what to say about them."""

    shared: list[str] = field(default_factory=list)
    """The engine's, equal on every rank."""
    head: list[str] = field(default_factory=list)
    """The HTTP server's, but for host and port."""
    notices: list[str] = field(default_factory=list)
    api_key: str | None = None
    host: str | None = None
    port: int = 8000
    drafter: str | None = None
    has_access: bool = False
    """Whether a key is set, or everybody is allowed."""


_OF_HEAD = frozenset({"allowed-origins", "disable-log-stats", "shutdown-timeout"})


def map_flags(words: Sequence[str]) -> ServeFlags:
    """The command line of vLLM for options of `onebox serve`. Raises `UsageError` for what cannot be honoured."""
    flags = ServeFlags()
    names = set()
    for name, value in _pairs(words):
        names.add(name)
        _take(flags, name, value)
    if not names & {"tool-call-parser", "reasoning-parser"}:
        flags.shared += _PARSERS
    if flags.drafter is None:
        flags.notices.append(
            "No drafts: vLLM drafts only if told to; give --speculative-config "
            '\'{"method": "mtp", "num_speculative_tokens": 2}\'.'
        )
    return flags


def _take(flags: ServeFlags, name: str, value: str | None) -> None:
    if name in _OURS_ALONE:
        raise UsageError(f"--{name} is set by {_OURS_ALONE[name]}; leave it out.")
    if name in NO_COUNTERPART:
        flags.notices.append(f"--{name} has no counterpart in vLLM: {NO_COUNTERPART[name]}.")
    elif name in TRANSLATED:
        _translate(flags, name, value)
    elif name == "port":
        flags.port = _port(value)
    else:
        shown = [f"--{name}"] if value is None else [f"--{name}", value]
        (flags.head if name in _OF_HEAD else flags.shared).extend(shown)


def _translate(flags: ServeFlags, name: str, value: str | None) -> None:
    if name == "allow-open-server":
        flags.has_access = True
        return
    if name == "disable-log-requests":
        flags.head.append("--no-enable-log-requests")
        return
    if value is None:
        raise UsageError(f"--{name} needs a value.")
    if name == "host":
        flags.host = value
    elif name == "api-key":
        if flags.api_key is not None:
            raise UsageError("vLLM is given one API key here; give --api-key once.")
        flags.api_key, flags.has_access = value, True
    elif name == "kv-cache-dtype":
        flags.shared += ["--kv-cache-dtype", _kv_name(value)]
    else:
        _take_drafts(flags, value)


def _kv_name(value: str) -> str:
    if value in _KV_NAMES:
        return _KV_NAMES[value]
    if value.startswith("turboquant_k"):
        known = ", ".join(name for name in _KV_NAMES if name != "auto")
        raise UsageError(f"--kv-cache-dtype {value} has no counterpart in vLLM; give one of {known}.")
    return value  # vLLM's own name


def _take_drafts(flags: ServeFlags, text: str) -> None:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--speculative-config is not JSON ({error}).") from None
    if not isinstance(given, dict):
        raise UsageError(f"--speculative-config must be a JSON object, not {text}.")
    method = given.get("method")
    if method == "none":
        flags.drafter = "none"
        return
    if method in (None, "auto"):
        given["method"] = "mtp"
        flags.notices.append("--speculative-config: vLLM does not choose between drafters; mtp is used.")
    given.setdefault("num_speculative_tokens", 2)
    flags.drafter = str(given["method"])
    flags.shared += ["--speculative-config", json.dumps(given)]


def refuse_open_server(host: str, flags: ServeFlags) -> None:
    """As `onebox serve` does: a server that other machines reach has a key, or it is said that it needs none."""
    if not is_loopback(host) and not flags.has_access:
        raise UsageError(
            f"--host {host} lets other machines call this server, and it has no API key; set one with --api-key, or "
            "allow everybody with --allow-open-server."
        )


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(name without dashes, value); the next word is the value unless it begins with a dash."""
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("-") or word in ("-", "--"):
            raise UsageError(f"{word!r} is no option; the checkpoint is named before `--`.")
        name, has_value, value = word.partition("=")
        name = _SHORT.get(name, name.lstrip("-").replace("_", "-"))
        if not has_value and left and not left[0].startswith("-"):
            value = left.pop(0)
            has_value = "="
        yield name, value if has_value else None


def _port(value: str | None) -> int:
    if value is None or not value.isdecimal() or not 0 < int(value) < 65536:
        raise UsageError(f"--port is {value!r}; give a number from 1 to 65535.")
    return int(value)
