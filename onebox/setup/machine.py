"""The first step: whether this machine can run what the recipe makes, before anything large is fetched."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onebox.engine.api import EngineOptions, TokenInfo, check_torch, foresee_memory, plan_engine
from onebox.planner.memory import MemoryPlan
from onebox.spec.hardware import GIB, Box, detect_box, detect_host, nvidia_driver
from onebox.spec.model import spec_from_config
from onebox.spec.modules import ModuleClass

__all__ = ["Machine", "describe_memory", "find_machine"]


@dataclass(frozen=True)
class Machine:
    """The machine at hand as the model will use it."""

    box: Box
    driver: str
    """Its version; empty without a GPU."""
    torch_version: str

    @property
    def uses_gpu(self) -> bool:
        return bool(self.box.compute_capability)

    def __str__(self) -> str:
        if self.uses_gpu:
            return f"{self.box.device}, driver {self.driver}, torch {self.torch_version}"
        return f"no GPU: the model runs on the CPU, which is for small models; torch {self.torch_version}"

    def plan_checkpoint(self, directory: Path, options: EngineOptions) -> MemoryPlan:
        """The memory plan of a checkpoint that lies here. Raises `DoesNotFitError`, with a table."""
        return plan_engine(directory, options, TokenInfo(), self.box).memory

    def plan_future(
        self, config: Mapping[str, Any], class_bytes: Mapping[ModuleClass, int], options: EngineOptions
    ) -> MemoryPlan:
        """The memory plan of a checkpoint that is yet to be fetched or built. Raises `DoesNotFitError`."""
        return foresee_memory(spec_from_config(config, options.hf_overrides), class_bytes, options, self.box)


def find_machine(options: EngineOptions, *, is_shared: bool = True) -> Machine:
    """Looks at GPU, driver and torch; raises `UnsupportedError` for a torch that cannot use the GPU.

    With `is_shared`, memory that other programs use now is not available.
    """
    box = detect_host() if options.device == "cpu" else detect_box()
    version = check_torch(box)
    box = box if is_shared else replace(box, available_bytes=None)
    return Machine(box, nvidia_driver() if box.compute_capability else "", version)


def describe_memory(plan: MemoryPlan) -> str:
    """One line of what the plan takes."""
    kv = plan.request.kv.name
    return (
        f"{plan.weights_bytes / GIB:.2f} GiB of weights and {plan.kv_tokens:,} tokens of {kv} KV cache "
        f"fit into {plan.box.memory_bytes / GIB:.1f} GiB of memory"
    )
