"""The engine on the tiny random model, put together by hand."""

from onebox.engine.api import Engine, EngineConfig, SpeculationConfig, SpeculationMethod
from onebox.engine.runner import ModelRunner
from onebox.model.memory import Memory, MemoryShape
from onebox.model.qwen3_5 import Qwen35
from onebox.spec.kv import KVFormat


def tiny_runner(model: Qwen35, config: EngineConfig) -> ModelRunner:
    speculation = config.speculation
    shape = MemoryShape(
        KVFormat.parse("bf16"),
        config.num_pages + 1,
        config.max_num_seqs,
        config.num_checkpoints,
        config.rows_per_sequence,
        speculation.with_mtp,
    )
    runner = ModelRunner(model, Memory.allocate(model.spec, shape, model.dtype, model.device), config)
    runner.capture_graphs()
    return runner


def tiny_engine(
    model: Qwen35, method: str = "none", max_drafts: int = 0, acceptance: tuple[float, ...] = (), **limits: int
) -> Engine:
    sizes = {"max_model_len": 1000, "num_pages": 100, "num_checkpoints": 8, "max_num_waiting": 10_000}
    speculation = SpeculationConfig(SpeculationMethod(method), max_drafts, synthetic_acceptance=acceptance)
    config = EngineConfig(**(sizes | limits), speculation=speculation)
    return Engine(tiny_runner(model, config), config)
