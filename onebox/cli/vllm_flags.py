"""Flags of `vllm serve` that `onebox serve` does not have, as data: why each has no effect here, or why it is refused.

All of vLLM 0.32's, and older ones that people still paste. Names are without their dashes. Options of `onebox serve`
itself are not listed: they have vLLM's names and meaning.
"""

from typing import NamedTuple

__all__ = ["FLAGS", "KV_NAMES", "LIST_FLAGS", "SHORT_NAMES", "VllmFlag", "own_kv_name"]


class VllmFlag(NamedTuple):
    """One flag of vLLM."""

    reason: str
    takes_value: bool = True
    accepted: frozenset[str] | None = None
    """Values that mean what happens here anyway; others are refused. None: all of them."""


_ONE_GPU = "onebox runs on one GPU of one machine"
_MANY = f"{_ONE_GPU}; `onebox scaleout` plans and launches the same checkpoint on several, with stock vLLM"
_OWN_KERNELS = "onebox has its own kernels, chosen when the model is loaded"
_OWN_STATES = "onebox keeps DeltaNet states in pools of their own and caches them with their prefixes"
_NO_UVICORN_LOG = (
    "uvicorn's own log is off; a request has one line here, and --log-level and --log-format set its style"
)
_ROPE = "the rotary embedding is changed as in newer vLLM, with --hf-overrides and text_config.rope_parameters"
_ON_DISK = "prefixes are kept on disk, exactly, with --prefix-dir DIR and --prefix-disk-bytes"
_ONE_FORMAT = "the family has one {} format, which is always parsed"
_NO_ADAPTERS = "onebox serves checkpoints without adapters"
_NO_CODE = "no code is loaded into the server; put it into a proxy in front of it"
_NO_OFFLOADING = "weights are never offloaded; `onebox plan` says what fits"
_OWN_METRICS = "`/metrics`, usage and the lines of speeds always tell what is measured"
_OWN_LOADER = "files are read ahead through one bounded buffer"
_OWN_PICTURES = "pictures are decoded in processes of their own, and the vision tower has the dtype of activations"
_OWN_PREFIXES = "prefixes are compared token by token and kept until the room is needed"
_OWN_ORDER = "prompts share the tokens of a step in their order; --max-num-batched-tokens sets how many"
_RESTARTS = "the engine has a process of its own, which is always restarted when it dies"
_NUMA = "numactl in front of the command binds it to nodes and CPUs"
_TEXT_ALONE = "onebox generates text"


def _for_each(reason: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, reason)


_NO_EFFECT_SWITCHES = {
    **_for_each(
        _OWN_KERNELS,
        "enable-flash-late-interaction",
        "enable-batch-sharded-sampling",
        "enable-hc-sp",
        "kv-sharing-fast-prefill",
        "swa-bounded-replay",
        "use-fp64-gumbel",
        "disable-sliding-window",
        "enable-cumem-allocator",
        "enable-shm-tensor-arena",
        "jit-monitor-verbose",
    ),
    **_for_each(
        _OWN_STATES,
        "enable-mamba-cache-stochastic-rounding",
        "enable-mamba-shared-prefix-checkpoint",
        "use-replayssm",
    ),
    **_for_each(
        _ONE_GPU,
        "dcp-q-replicate",
        "enable-ep-weight-filter",
        "enable-eplb",
        "disable-nccl-for-dp-synchronization",
        "enable-nccl-comm-suspend",
        "ray-workers-use-nsight",
        "aggregate-engine-logging",
    ),
    **_for_each(
        _OWN_METRICS,
        "enable-per-request-metrics",
        "kv-cache-metrics",
        "cudagraph-metrics",
        "enable-layerwise-nvtx-tracing",
        "enable-mfu-metrics",
        "enable-logging-iteration-details",
    ),
    **_for_each(
        "--max-log-len N adds the first N characters of prompts and answers to a request's line",
        "enable-log-outputs",
        "enable-log-deltas",
    ),
    **_for_each("other families have it", "cohere-is-reasoning-model"),
    **_for_each(_OWN_PICTURES, "interleave-mm-strings", "mm-device-do-normalize", "disable-chunked-mm-input"),
    **_for_each(
        _NO_ADAPTERS,
        "enable-tower-connector-lora",
        "fully-sharded-loras",
        "specialize-active-lora",
        "enable-mixed-moe-lora-format",
        "enable-moe-shared-loras",
    ),
    **_for_each(_OWN_ORDER, "long-prefill-token-threshold-adaptive", "scheduler-reserve-full-isl"),
    "enable-fault-tolerance": _RESTARTS,
    "numa-bind": _NUMA,
    "sleep-mode-offload-cudagraph": "graphs go with the engine's process when --idle-release frees its memory",
    "allow-deprecated-quantization": "formats are read from the checkpoint, tensor by tensor",
    "use-tqdm-on-load": "a start tells how far it is in lines",
    "log-error-stack": "a failure of onebox's own has its traceback in the log, a refused request has one line",
    "enable-force-include-usage": "a stream has usage where its request asks for it with stream_options",
    "enable-tokenizer-info-endpoint": "`/tokenize` and `/detokenize` are there; its files are not given out",
    "exclude-tools-when-tool-choice-none": "tools are left out of the prompt where tool_choice is none",
    "allow-credentials": "keys are sent as headers, never as cookies",
    "enable-ssl-refresh": "a renewed certificate is read at the next start",
    "disable-fastapi-docs": "`/docs` and `/openapi.json` stay: they tell the API's form and nothing of this server",
    "enable-offline-docs": "`/` and `/docs` load nothing from elsewhere",
    "fail-on-environ-validation": "what cannot be honoured always ends the start",
    "enable-prompt-tokens-details": "usage always tells cached tokens",
    "enable-server-load-tracking": "`/metrics` always tells running and waiting requests",
    "disable-cascade-attn": _OWN_KERNELS,
    "enable-dbo": _OWN_KERNELS,
    "skip-mm-profiling": "memory is planned from sizes, nothing is profiled",
    "trust-remote-code": "code from a checkpoint is never run",
    "enable-auto-tool-choice": "tool calls are always parsed if a request has tools",
    "enforce-eager": "graphs are captured in seconds, so they are always used",
    "enable-chunked-prefill": "prompts always share steps with running answers",
    "enable-flashinfer-autotune": _OWN_KERNELS,
    "async-scheduling": "a step's tokens are always delivered while the next step is computed",
    "disable-hybrid-kv-cache-manager": "KV pages and DeltaNet states always have pools of their own",
    "calculate-kv-scales": "every stored vector has a scale of its own",
    "disable-uvicorn-access-log": _NO_UVICORN_LOG,
    "enable-log-requests": "a request has one line unless --disable-log-requests is given",
    "enable-request-id-headers": "every answer has an x-request-id",
    "disable-custom-all-reduce": _ONE_GPU,
    "disable-frontend-multiprocessing": "the engine always has a process of its own",
}
_NO_EFFECT_VALUES = {
    **_for_each(
        _OWN_KERNELS,
        "mamba-ssu-algorithm",
        "sparse-indexer-topk-backend",
        "kda-prefill-backend",
        "kda-decode-backend",
        "ir-op-priority",
        "kernel-config",
        "performance-mode",
        "jit-monitor-mode",
    ),
    **_for_each(_OWN_STATES, "mamba-cache-philox-rounds", "replayssm-buffer-len"),
    **_for_each(
        _ONE_GPU,
        "data-parallel-backend",
        "dp-sync-interval",
        "all2all-backend",
        "eplb-config",
        "expert-placement-strategy",
        "ubatch-size",
        "dbo-decode-token-threshold",
        "dbo-prefill-token-threshold",
        "distributed-timeout-seconds",
        "cpu-distributed-timeout-seconds",
        "dcp-comm-backend",
        "dcp-kv-cache-interleave-size",
        "cp-kv-cache-interleave-size",
    ),
    **_for_each(
        _OWN_METRICS,
        "show-hidden-metrics-for-version",
        "per-request-spec-decode-metrics",
        "kv-cache-metrics-sample",
        "custom-histogram-buckets",
        "profiler-config",
    ),
    **_for_each(
        _OWN_LOADER,
        "safetensors-prefetch-num-threads",
        "safetensors-prefetch-block-size",
        "pt-load-map-location",
    ),
    **_for_each(
        _OWN_PICTURES,
        "mm-hasher-algorithm",
        "mm-shm-cache-max-object-size-mb",
        "mm-encoder-attn-dtype",
        "mm-encoder-fp8-scale-path",
        "mm-encoder-fp8-scale-save-path",
        "mm-encoder-fp8-scale-save-margin",
        "mm-tensor-ipc",
        "mm-processor-device",
        "mm-ipc-gpu-memory-gb",
        "video-pruning-method",
        "ec-manager-config",
    ),
    **_for_each(
        _NO_ADAPTERS,
        "max-loras",
        "max-lora-rank",
        "lora-dtype",
        "max-cpu-loras",
        "lora-target-modules",
        "max-lora-cls-labels",
    ),
    **_for_each(_OWN_PREFIXES, "prefix-cache-retention-interval", "prefix-match-unit", "watermark"),
    **_for_each(_OWN_ORDER, "max-num-scheduled-tokens", "prefill-schedule-interval"),
    **_for_each(_NO_OFFLOADING, "offload-backend", "offload-num-in-group", "offload-prefetch-step"),
    **_for_each(_NUMA, "numa-bind-nodes", "numa-bind-cpus"),
    **_for_each(
        "graphs are captured for every batch size and length", "cudagraph-capture-sizes", "max-cudagraph-capture-size"
    ),
    **_for_each(
        "headers have limits of onebox's own: 64 KiB and 100 fields",
        "h11-max-incomplete-event-size",
        "h11-max-header-count",
    ),
    **_for_each("--log-level and --log-format set the style of the log", "logging-config", "log-config-file"),
    **_for_each("pages of --allowed-origins may use every method and header", "allowed-methods", "allowed-headers"),
    **_for_each(
        "`/v1/models` tells a fingerprint of all that decides answers", "fingerprint-mode", "fingerprint-value"
    ),
    **_for_each("other families have it", "cohere-format"),
    "fault-tolerance-config": _RESTARTS,
    "quantization-config": "formats are read from the checkpoint, tensor by tensor",
    "disable-access-log-for-endpoints": "GET requests have a line at --log-level debug alone",
    "sse-keep-alive-interval": "a stream that is silent for 15 seconds sends a heartbeat",
    "renderer-num-workers": "prompts are rendered beside the engine, small ones apart from large ones",
    "max-logprobs": "top_logprobs may be 20 at most",
    "max-num-active-seqs": "--max-num-seqs is how many requests run at once",
    "hf-token": "set HF_TOKEN in the environment, where it is not in the list of processes",
    "aux-output-config": "an answer has nothing beside its text, log-probabilities and usage",
    "tokenizer-revision": "the tokenizer is the checkpoint's own",
    "code-revision": "code from a checkpoint is never run",
    "ignore-patterns": "only files that the index names are read",
    "model-impl": "the family is implemented once, on onebox's kernels",
    "max-parallel-loading-workers": "files are read ahead through one bounded buffer",
    "prefix-caching-hash-algo": "prefixes are compared token by token",
    "max-num-partial-prefills": "prompts share the tokens of a step in their order",
    "max-long-partial-prefills": "prompts share the tokens of a step in their order",
    "long-prefill-token-threshold": "prompts share the tokens of a step in their order",
    "preemption-mode": "a preempted request is computed again, with the same tokens",
    "num-lookahead-slots": "drafts are set with --speculative-config",
    "tool-call-parser": _ONE_FORMAT.format("tool call"),
    "reasoning-parser": _ONE_FORMAT.format("reasoning"),
    "reasoning-config": "a reasoning over its budget is closed in the words that the model's makers give for it",
    "attention-backend": _OWN_KERNELS,
    "attention-config": _OWN_KERNELS,
    "moe-backend": _OWN_KERNELS,
    "linear-backend": _OWN_KERNELS,
    "mamba-backend": _OWN_KERNELS,
    "gdn-prefill-backend": _OWN_KERNELS,
    "mm-encoder-attn-backend": _OWN_KERNELS,
    "compilation-config": "nothing is traced by torch.compile; `onebox warm` compiles the kernels ahead",
    "optimization-level": "nothing is traced by torch.compile; `onebox warm` compiles the kernels ahead",
    "max-seq-len-to-capture": "graphs are captured for every length",
    "turboquant-metadata-path": "no file is needed: rotation and codebooks are the same for every model",
    "mamba-cache-mode": _OWN_STATES,
    "mamba-cache-dtype": "convolution rows have the dtype of activations; --mamba-ssm-cache-dtype is that of states",
    "mamba-block-size": _OWN_STATES,
    "block-size": "a KV page has 64 tokens",
    "swap-space": "nothing is swapped: a preempted request is computed again, with the same tokens",
    "quantization": "formats are read from the checkpoint, tensor by tensor",
    "distributed-executor-backend": _ONE_GPU,
    "safetensors-load-strategy": "files are read ahead through one bounded buffer",
    "structured-outputs-config": "constrained answers always use llguidance",
    "guided-decoding-backend": "constrained answers always use llguidance",
    "chat-template-content-format": "content is always passed in the form that the template reads",
    "scheduling-policy": "requests of equal priority are served in their order",
    "collect-detailed-traces": "a request's trace always has spans of its queue, prefill and decode",
    "stream-interval": "tokens are sent after each step",
    "mm-processor-cache-gb": "pictures are cached with the prefix that holds them",
    "mm-processor-cache-type": "pictures are cached with the prefix that holds them",
    "mm-encoder-tp-mode": _ONE_GPU,
    "uvicorn-log-level": _NO_UVICORN_LOG,
    "seed": "a request gives its own `seed`; without one it is drawn anew",
}
_ONE = frozenset({"1"})
_ONLY = {
    "tensor-parallel-size": (_ONE, _MANY),
    "pipeline-parallel-size": (_ONE, _MANY),
    "data-parallel-size": (_ONE, _MANY),
    "decode-context-parallel-size": (_ONE, _ONE_GPU),
    "nnodes": (_ONE, _MANY),
    "node-rank": (frozenset({"0"}), _ONE_GPU),
    "api-server-count": (_ONE, "one process serves HTTP"),
    "cpu-offload-gb": (frozenset({"0"}), _NO_OFFLOADING),
    "offload-group-size": (frozenset({"0"}), _NO_OFFLOADING),
    "data-parallel-size-local": (_ONE, _MANY),
    "prefill-context-parallel-size": (_ONE, _ONE_GPU),
    "task": (frozenset({"generate", "auto"}), _TEXT_ALONE),
    "runner": (frozenset({"generate", "auto"}), _TEXT_ALONE),
    "convert": (frozenset({"none", "auto"}), _TEXT_ALONE),
    "worker-cls": (frozenset({"auto"}), _NO_CODE),
    "response-role": (frozenset({"assistant"}), "an answer's role is assistant"),
    "logprobs-mode": (frozenset({"raw_logprobs"}), "log-probabilities are the model's own, before sampling parameters"),
    "ssl-cert-reqs": (
        frozenset({"0", "2"}),
        "clients must show a certificate where --ssl-ca-certs is given, and need none otherwise",
    ),
    "tool-strict-level": (
        frozenset({"auto"}),
        "arguments are constrained to their schema where tool_choice asks for a call",
    ),
    "anthropic-disabled-thinking-effort": (frozenset({"auto", "none"}), "a request without thinking gets none"),
    "video-pruning-rate": (frozenset({"0", "0.0"}), "all patches of a video are read"),
    "model-loader-extra-config": (frozenset({"{}"}), _OWN_LOADER),
    "media-io-kwargs": (
        frozenset({"{}"}),
        "limits of pictures and videos are onebox's own; --limit-mm-per-prompt counts them",
    ),
    "additional-config": (frozenset({"{}"}), "there is no platform but NVIDIA's GPUs and the CPU"),
    "tokenizer-mode": (frozenset({"auto", "hf"}), "the checkpoint's tokenizer.json is used"),
    "config-format": (frozenset({"auto", "hf"}), "the checkpoint's config.json is used"),
}
_NO_GRPC = "it is reached over HTTP on an address and a port"
_REFUSED_SWITCHES = {
    **_for_each(
        _MANY,
        "enable-scale-out",
        "enable-elastic-ep",
        "data-parallel-hybrid-lb",
        "data-parallel-external-lb",
        "data-parallel-multi-port-external-lb",
    ),
    **_for_each(
        "an answer has nothing beside its text, log-probabilities and usage",
        "enable-return-routed-experts",
        "return-sampling-mask",
    ),
    **_for_each("prompts are texts, token ids, pictures and videos", "enable-prompt-embeds", "enable-mm-embeds"),
    "grpc": _NO_GRPC,
    "tokens-only": "texts are always made; a request gets token ids too with return_token_ids",
    "return-tokens-as-token-ids": "a request gets token ids with return_token_ids",
    "trust-request-chat-template": "requests cannot bring a template; --chat-template gives one for all",
    "trust-request-mm-kwargs": "requests cannot change how pictures are prepared",
    "skip-tokenizer-init": "texts need the tokenizer",
    "mm-encoder-only": _TEXT_ALONE,
    "enable-trace-replay": "no requests are recorded; `onebox bench` makes loads of its own",
    "no-enable-chunked-prefill": (
        "prompts are always prefilled in chunks that share steps with running answers; remove the flag, "
        "--max-num-batched-tokens sets the prompt tokens per step"
    ),
    "headless": _MANY,
    "enable-expert-parallel": _MANY,
    "enable-sleep-mode": (
        "--idle-release SECONDS frees the device's memory while nobody asks, and the next request wakes the server"
    ),
    "enable-lora": _NO_ADAPTERS,
}
_REFUSED_VALUES = {
    **_for_each(
        _MANY,
        "data-parallel-rank",
        "data-parallel-start-rank",
        "data-parallel-address",
        "data-parallel-rpc-port",
        "data-parallel-supervisor-port",
        "dp-supervisor-probe-interval-s",
        "dp-supervisor-probe-timeout-s",
        "dp-supervisor-probe-failure-threshold",
        "elastic-ep-max-dp-size",
    ),
    **_for_each(
        _NO_CODE,
        "middleware",
        "tool-parser-plugin",
        "reasoning-parser-plugin",
        "io-processor-plugin",
        "logits-processors",
        "scheduler-cls",
        "worker-extension-cls",
        "model-class-overrides",
    ),
    **_for_each(_NO_GRPC, "grpc-port", "uds"),
    **_for_each(_NO_OFFLOADING, "cpu-offload-params", "offload-params"),
    **_for_each(_NO_ADAPTERS, "lora-modules", "default-mm-loras"),
    **_for_each(_TEXT_ALONE, "pooler-config", "diffusion-config", "engram-config", "watermark-config"),
    **_for_each("there are no connectors", "ec-transfer-config", "kv-events-config", "weight-transfer-config"),
    "tool-server": "the server runs no tools; clients do",
    "ssl-ciphers": "TLS 1.2 and later have the ciphers of the installed OpenSSL; its own configuration restricts them",
    "allowed-media-domains": "pictures are fetched from any public address; a firewall or a proxy restricts that",
    "mm-processor-kwargs": "the checkpoint's preprocessor_config.json tells how pictures are prepared",
    "hf-config-path": "the checkpoint's own config.json is used; --hf-overrides changes values of it",
    "kv-cache-dtype-skip-layers": "all layers have the KV format of --kv-cache-dtype",
    "sleep-preserve-parameter-names": "--idle-release frees all of the device's memory",
    "device-ids": "set CUDA_VISIBLE_DEVICES to the GPU",
    "max-num-queued-tokens": "the queue is bounded in requests, with --max-num-waiting",
    "revision": "write it behind the repository, owner/name@revision",
    "master-addr": _ONE_GPU,
    "master-port": _ONE_GPU,
    "num-gpu-blocks-override": "give the size in bytes with --kv-cache-memory-bytes",
    "rope-scaling": _ROPE,
    "rope-theta": _ROPE,
    "tokenizer": "the checkpoint's own tokenizer is used; put another one into its directory",
    "download-dir": "set HF_HOME to move the Hugging Face cache",
    "kv-transfer-config": f"there are no connectors; {_ON_DISK}, and servers of one model may share the directory",
    "kv-offloading-size": f"nothing is offloaded to host memory; {_ON_DISK}",
    "kv-offloading-backend": f"nothing is offloaded to host memory; {_ON_DISK}",
}
_NONE: frozenset[str] = frozenset()

FLAGS: dict[str, VllmFlag] = {
    **{name: VllmFlag(why, takes_value=False) for name, why in _NO_EFFECT_SWITCHES.items()},
    **{
        f"no-{name}": VllmFlag(why, takes_value=False)
        for name, why in {**_NO_EFFECT_SWITCHES, **_REFUSED_SWITCHES}.items()
    },
    "no-language-model-only": VllmFlag("pictures are read unless --language-model-only is given", takes_value=False),
    **{name: VllmFlag(why) for name, why in _NO_EFFECT_VALUES.items()},
    **{name: VllmFlag(why, accepted=values) for name, (values, why) in _ONLY.items()},
    **{name: VllmFlag(why, takes_value=False, accepted=_NONE) for name, why in _REFUSED_SWITCHES.items()},
    **{name: VllmFlag(why, accepted=_NONE) for name, why in _REFUSED_VALUES.items()},
}
"""By name; a later table holds where two have a name."""
LIST_FLAGS = frozenset(
    {
        "served-model-name",
        "api-key",
        "lora-modules",
        "allowed-media-domains",
        "sleep-preserve-parameter-names",
        "logits-processors",
        "ignore-patterns",
        "numa-bind-nodes",
        "numa-bind-cpus",
        "kv-cache-dtype-skip-layers",
        "cpu-offload-params",
        "offload-params",
        "lora-target-modules",
        "collect-detailed-traces",
        "cudagraph-capture-sizes",
    }
)
"""Those that take all words up to the next flag."""
SHORT_NAMES = {
    "--no-enable-log-requests": "--disable-log-requests",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-q": "--quantization",
    "-ac": "--attention-config",
    "-cc": "--compilation-config",
    "-sc": "--speculative-config",
    "-dc": "--diffusion-config",
    "-ep": "--enable-expert-parallel",
    "-asc": "--api-server-count",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--max-num-queued-reqs": "--max-num-waiting",
    "--spec-method": "--speculative-config.method",
    "--spec-model": "--speculative-config.model",
    "--spec-tokens": "--speculative-config.num_speculative_tokens",
    "-O": "--optimization-level",
}
"""Other names of a flag, or of a part of one."""
KV_NAMES = {
    "turboquant35": ("turboquant_k4v4", "130 bytes a vector of 256, where theirs has 128"),
    "turboquant_asym": ("turboquant_k4v4", "130 bytes a vector of 256, where theirs has 128"),
    "turboquant25": ("turboquant_k3v3", "98 bytes a vector of 256, where theirs has 108"),
    "turboquant_q8k_tq35v": ("turboquant_k8v4", "keys in 8 bits, values in 4 instead of 3.5"),
    "turboquant_q8k_tq25v": ("turboquant_k8v3", "keys in 8 bits, values in 3 instead of 2.5"),
    "turboquant_4bit_nc": ("turboquant_k4v4", "the same widths"),
    "turboquant_k3v4_nc": ("turboquant_k3v4", "the same widths"),
    "turboquant_3bit_nc": ("turboquant_k3v3", "the same widths"),
}
"""Names that vLLM and its patches have for TurboQuant: the format here that has at least as many bits, and why."""
_PLAIN_KV_NAMES = {"auto": "bf16", "bfloat16": "bf16", "fp8_e4m3": "fp8"}


def own_kv_name(name: str) -> str:
    """Our name of a KV format that may have one of vLLM's."""
    return KV_NAMES[name][0] if name in KV_NAMES else _PLAIN_KV_NAMES.get(name, name)
