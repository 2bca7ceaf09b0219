"""The engine's public names: server, CLI, `onebox.LLM` and the other rooms import the engine from here only.

Start an engine (`plan_engine` and `start_engine` on a thread of this process, `EngineProcess` in its own), submit a
`Request`, read its Events from the `RequestHandle`. Importing this module does not import torch.
"""

from onebox.engine.client import (
    EngineClient,
    EngineRestartingError,
    Health,
    HealthStatus,
    Observer,
    RequestHandle,
    Watch,
)
from onebox.engine.config import EngineConfig, PrefixDiskConfig, SpeculationConfig, SpeculationMethod
from onebox.engine.draft.kinds import Drafter, TextPart
from onebox.engine.draft.vocabulary_start import kept_counts_path
from onebox.engine.engine import Deliver, Engine
from onebox.engine.grammar.bounds import MAX_GRAMMAR_BYTES
from onebox.engine.grammar.value import Grammar, GrammarError, GrammarKind
from onebox.engine.logprobs import LogprobRows, TokenLogprob
from onebox.engine.plan import (
    EngineOptions,
    EnginePlan,
    TokenInfo,
    check_torch,
    foresee_memory,
    plan_engine,
    prefix_disk,
)
from onebox.engine.prefix import PrefixLookup, PrefixStats
from onebox.engine.remote.messages import (
    DeviceMemory,
    DraftVocabOpened,
    Planned,
    PrefixDiskOpened,
    Progress,
    StartDetail,
    StartPhase,
)
from onebox.engine.remote.parent import EngineProcess
from onebox.engine.remote.supervise import RestartPolicy
from onebox.engine.request import (
    AcceptanceCounts,
    CacheTier,
    ClassCounts,
    ClientShare,
    ContextTooLongError,
    Counts,
    EngineStoppedError,
    Event,
    Failed,
    Finished,
    FinishReason,
    Pictures,
    PromptLogprobs,
    QueueFullError,
    Request,
    SamplingParams,
    ShareFullError,
    Started,
    Tokens,
    Vision,
)
from onebox.engine.start import CheckpointStarter, compile_ahead, kernels_are_compiled, start_engine
from onebox.engine.stats import DiskStats, DraftVocabStats, EngineStats, FrozenTotals, add_classes
from onebox.spec.kv import PAGE_TOKENS
from onebox.spec.vocabulary import TokenTable

__all__ = [
    "MAX_GRAMMAR_BYTES",
    "PAGE_TOKENS",
    "AcceptanceCounts",
    "CacheTier",
    "CheckpointStarter",
    "ClassCounts",
    "ClientShare",
    "ContextTooLongError",
    "Counts",
    "Deliver",
    "DeviceMemory",
    "DiskStats",
    "DraftVocabOpened",
    "DraftVocabStats",
    "Drafter",
    "Engine",
    "EngineClient",
    "EngineConfig",
    "EngineOptions",
    "EnginePlan",
    "EngineProcess",
    "EngineRestartingError",
    "EngineStats",
    "EngineStoppedError",
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "FrozenTotals",
    "Grammar",
    "GrammarError",
    "GrammarKind",
    "Health",
    "HealthStatus",
    "LogprobRows",
    "Observer",
    "Pictures",
    "Planned",
    "PrefixDiskConfig",
    "PrefixDiskOpened",
    "PrefixLookup",
    "PrefixStats",
    "Progress",
    "PromptLogprobs",
    "QueueFullError",
    "Request",
    "RequestHandle",
    "RestartPolicy",
    "SamplingParams",
    "ShareFullError",
    "SpeculationConfig",
    "SpeculationMethod",
    "StartDetail",
    "StartPhase",
    "Started",
    "TextPart",
    "TokenInfo",
    "TokenLogprob",
    "TokenTable",
    "Tokens",
    "Vision",
    "Watch",
    "add_classes",
    "check_torch",
    "compile_ahead",
    "foresee_memory",
    "kept_counts_path",
    "kernels_are_compiled",
    "plan_engine",
    "prefix_disk",
    "start_engine",
]
