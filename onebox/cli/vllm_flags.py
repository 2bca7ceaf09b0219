"""Flags of `vllm serve` that `onebox serve` does not have, as data: why each has no effect here, or why it is refused.

Names are without their dashes. Options of `onebox serve` itself are not listed: they have vLLM's names and meaning.
"""

from typing import NamedTuple

__all__ = ["FLAGS", "KV_NAMES", "SHORT_NAMES", "VllmFlag", "own_kv_name"]


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

_NO_EFFECT_SWITCHES = {
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
    "cpu-offload-gb": (frozenset({"0"}), "weights are never offloaded; `onebox plan` says what fits"),
    "task": (frozenset({"generate", "auto"}), "onebox generates text"),
    "runner": (frozenset({"generate", "auto"}), "onebox generates text"),
    "tokenizer-mode": (frozenset({"auto", "hf"}), "the checkpoint's tokenizer.json is used"),
    "config-format": (frozenset({"auto", "hf"}), "the checkpoint's config.json is used"),
}
_REFUSED_SWITCHES = {
    "no-enable-chunked-prefill": (
        "prompts are always prefilled in chunks that share steps with running answers; remove the flag, "
        "--max-num-batched-tokens sets the prompt tokens per step"
    ),
    "headless": _MANY,
    "enable-expert-parallel": _MANY,
    "enable-sleep-mode": (
        "--idle-release SECONDS frees the device's memory while nobody asks, and the next request wakes the server"
    ),
    "enable-lora": "onebox serves checkpoints without adapters",
}
_REFUSED_VALUES = {
    "revision": "write it behind the repository, owner/name@revision",
    "middleware": "no code is loaded into the server; put it into a proxy in front of it",
    "lora-modules": "onebox serves checkpoints without adapters",
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
    **{f"no-{name}": VllmFlag(why, takes_value=False) for name, why in _NO_EFFECT_SWITCHES.items()},
    **{name: VllmFlag(why) for name, why in _NO_EFFECT_VALUES.items()},
    **{name: VllmFlag(why, accepted=values) for name, (values, why) in _ONLY.items()},
    **{name: VllmFlag(why, takes_value=False, accepted=_NONE) for name, why in _REFUSED_SWITCHES.items()},
    **{name: VllmFlag(why, accepted=_NONE) for name, why in _REFUSED_VALUES.items()},
}
"""By name; a later table holds where two have a name."""
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
    "-O": "--optimization-level",
}
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
