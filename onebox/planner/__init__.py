"""Memory plan and roofline speed projection, computed from sizes alone. Does not import torch."""

from onebox.planner.memory import MemoryPart, MemoryPlan, MemoryRequest, loaded_weight_bytes, plan_memory
from onebox.planner.presets import PRESETS, WeightPreset, named_preset
from onebox.planner.report import Fit, PlanReport, Weights, make_report, to_json
from onebox.planner.roofline import Projection, Rate, Workload, parse_acceptance, project, tokens_per_step
from onebox.planner.vllm_accounting import VllmCache, vllm_cache

__all__ = [
    "PRESETS",
    "Fit",
    "MemoryPart",
    "MemoryPlan",
    "MemoryRequest",
    "PlanReport",
    "Projection",
    "Rate",
    "VllmCache",
    "WeightPreset",
    "Weights",
    "Workload",
    "loaded_weight_bytes",
    "make_report",
    "named_preset",
    "parse_acceptance",
    "plan_memory",
    "project",
    "to_json",
    "tokens_per_step",
    "vllm_cache",
]
