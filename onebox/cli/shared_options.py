"""Options that `plan`, `serve`, `warm` and others share, declared once: a launch line can be planned as it is."""

from typing import Annotated

import typer

__all__ = [
    "DraftVocab",
    "HfOverrides",
    "KVCacheDtype",
    "LMHead",
    "LanguageModelOnly",
    "MaxModelLen",
    "MaxNumBatchedTokens",
    "MaxNumSeqs",
    "MemoryUtilization",
    "MtpFormat",
    "StateCacheDtype",
    "chosen_utilization",
]

KVCacheDtype = Annotated[
    str,
    typer.Option(
        help="KV cache: auto (bf16), bf16, fp8, turboquant, turboquant_kXvY (X, Y of 8, 4, 3, 2), or vLLM's name for "
        "one of them."
    ),
]
StateCacheDtype = Annotated[
    str, typer.Option(help="DeltaNet states: auto (float32), float32, bfloat16 or float16; arithmetic is float32.")
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Tokens of prompt and answer together; default: the model's limit.")
]
MaxNumSeqs = Annotated[int, typer.Option(help="Concurrent requests.")]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option(help="Prompt tokens computed in one step, a multiple of 64; 2048 on a GPU, 512 on a CPU.")
]
MemoryUtilization = Annotated[float | None, typer.Option(help="Share of the memory that onebox may use; default: 0.9.")]
LanguageModelOnly = Annotated[
    bool, typer.Option("--language-model-only", help="Do not load the vision tower; images are then refused.")
]
LMHead = Annotated[
    str, typer.Option(help="LM head: keep, or int8 to convert a BF16 one while loading, as `onebox build` would.")
]
MtpFormat = Annotated[str, typer.Option(help="MTP layer: keep, or int4 or fp8 to convert a BF16 one while loading.")]
DraftVocab = Annotated[
    str,
    typer.Option(
        metavar="auto|full|N|FILE",
        help="Tokens that the MTP head drafts from: auto (a sixth, following what the model says), full, that many, or "
        "the token ids of a file, one a line. No answer depends on it.",
    ),
]
HfOverrides = Annotated[
    str,
    typer.Option(
        help='JSON of values in place of config.json\'s, as in vLLM: {"text_config": {"rope_parameters": {...}}} '
        "stretches the context with YaRN."
    ),
]


def chosen_utilization(given: float | None) -> float:
    """The share of the memory, where --gpu-memory-utilization may not have been given."""
    from onebox.planner.memory import DEFAULT_UTILIZATION

    return DEFAULT_UTILIZATION if given is None else given
