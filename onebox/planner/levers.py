"""Levers: what a step reads, and how fast it is, with one thing changed and everything else as planned.

Bytes are those that `onebox build` would write, or the engine would read, and the assumptions are the projection's own:
acceptance, bandwidth and the cost of a kernel stay what they are. What a lever costs in quality is not counted here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from onebox.planner.presets import WRITTEN_PACKINGS, format_name
from onebox.planner.roofline import KERNEL_SECONDS, Projection, Workload, project, step_kernels
from onebox.spec.block_drafter import BlockDrafter
from onebox.spec.draft_vocab import default_draft_vocab_size
from onebox.spec.hardware import Box
from onebox.spec.head_planes import planes_pay
from onebox.spec.kv import KVFormat
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass
from onebox.spec.states import StateDtype
from onebox.spec.traffic import predicted_weight_bytes
from onebox.spec.weights import ExpertFormats, WeightFormat

__all__ = ["Lever", "Setting", "assumptions", "class_of_part", "find_levers", "mtp_head_cost"]

_C, _F = ModuleClass, WeightFormat
_HEAD = {_C.MTP_EXPERTS: _F.INT4, _C.MTP_ATTENTION: _F.INT4, _C.MTP_SHARED: _F.FP8}
"""As `build --mtp auto` writes it for the hybrid."""
_EXPERTS: Mapping[str, WeightFormat | ExpertFormats] = {
    "int4": _F.INT4,
    "int3, down int4": ExpertFormats(_F.INT3, _F.INT4),
    "int3": _F.INT3,
    "int2": _F.INT2,
}
_PLAIN = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Setting:
    """All that a projection is made of."""

    spec: ModelSpec
    stored: Mapping[ModuleClass, int]
    formats: Mapping[ModuleClass, str]
    """The format of each class, such as int4; int3/int4 where there are two."""
    box: Box
    kv: KVFormat
    workload: Workload

    def project(self) -> Projection:
        return project(self.spec, self.stored, self.box, self.kv, self.workload, self.formats)

    def with_formats(self, chosen: Mapping[ModuleClass, WeightFormat | ExpertFormats]) -> "Setting":
        """With these classes as `onebox build` writes them."""
        written = predicted_weight_bytes(self.spec, chosen, WRITTEN_PACKINGS)
        stored = {kind: written[kind] for kind in chosen if kind in self.stored}
        names = {kind: format_name(each) for kind, each in chosen.items()}
        return replace(self, stored={**self.stored, **stored}, formats={**self.formats, **names})

    def with_workload(self, **changes: int | StateDtype | BlockDrafter | None) -> "Setting":
        return replace(self, workload=replace(self.workload, **changes))  # type: ignore[arg-type]


class Lever(NamedTuple):
    """One change and what it brings."""

    part: str
    """The part of a step's bytes that it changes."""
    now: str
    instead: str
    how: str
    """Flags of `serve`, or of `build` where it begins with that."""
    saved_bytes: int
    """A step, expected; below 0 where the change reads more."""
    step_seconds: float | None
    """Of this engine with the change; None where the box's bandwidth is not known."""
    tokens_per_second: float | None
    """Likewise; None where the acceptance is not known either."""


def find_levers(setting: Setting) -> tuple[Lever, ...]:
    """Every lever that applies to `setting`, in the order of a step's parts."""
    now = setting.project()
    return tuple(_lever(now, *change) for make in _LEVERS for change in make(setting))


class _Change(NamedTuple):
    part: str
    now: str
    instead: str
    how: str
    setting: Setting


def _lever(now: Projection, part: str, was: str, instead: str, how: str, changed: Setting) -> Lever:
    after = changed.project()
    saved = now.expected.total_bytes - after.expected.total_bytes
    speed = after.engine_rate.tokens_per_second if after.engine_rate else None
    return Lever(part, was, instead, how, saved, after.engine_step_seconds, speed)


def _dense(setting: Setting, part: str, kind: ModuleClass, flag: str, *others: ModuleClass) -> Iterator[_Change]:
    """A class of projections in INT4, or in FP8 where it has more bits or fewer; `others` change with it."""
    now = setting.formats.get(kind)
    if not setting.stored.get(kind) or now is None:
        return
    for choice in (_F.FP8, _F.INT4):
        if choice.value != now and (now in _PLAIN or choice is not _F.FP8 or kind is _C.SHARED):
            changed = setting.with_formats(dict.fromkeys((kind, *others), choice))
            yield _Change(part, now, choice.value, f"build {flag} {choice.value}", changed)


def _delta(setting: Setting) -> Iterator[_Change]:
    return _dense(setting, "DeltaNet projections", _C.DELTA, "--delta")


def _attention(setting: Setting) -> Iterator[_Change]:
    return _dense(setting, "attention projections", _C.ATTENTION, "--attention")


def _shared(setting: Setting) -> Iterator[_Change]:
    return _dense(setting, "shared experts", _C.SHARED, "--shared")


def _states(setting: Setting) -> Iterator[_Change]:
    now = setting.workload.state_dtype
    other = StateDtype.BFLOAT16 if now is StateDtype.FLOAT32 else StateDtype.FLOAT32
    changed = setting.with_workload(state_dtype=other)
    yield _Change("DeltaNet state", now.value, other.value, f"--mamba-ssm-cache-dtype {other}", changed)


def _cache(setting: Setting) -> Iterator[_Change]:
    for name in ("bf16", "fp8", "turboquant"):
        kv = KVFormat.parse(name)
        if kv != setting.kv and setting.workload.context_tokens:
            yield _Change("KV cache", setting.kv.name, name, f"--kv-cache-dtype {name}", replace(setting, kv=kv))


def _experts(setting: Setting) -> Iterator[_Change]:
    now = setting.formats.get(_C.EXPERTS, "bf16")
    for name, choice in _EXPERTS.items():
        if format_name(choice) != now:
            how = " --experts-down ".join(f"build --experts {format_name(choice)}".split("/"))
            yield _Change("routed experts", now, name, how, setting.with_formats({_C.EXPERTS: choice}))


def _lm_head(setting: Setting) -> Iterator[_Change]:
    now = setting.formats.get(_C.LM_HEAD)
    if now in _PLAIN and setting.stored.get(_C.LM_HEAD):
        yield _Change("LM head", now, "int8", "--lm-head int8", setting.with_formats({_C.LM_HEAD: _F.INT8}))
    speed = setting.box.peak and setting.box.peak.bytes_per_second
    pays = planes_pay(setting.stored.get(_C.LM_HEAD, 0), speed)
    if now == _F.INT8.value and pays and not setting.workload.reads_candidates:
        # The engine does it by itself; whether it can depends on the requests, so the projection does not count on it.
        changed = setting.with_workload(reads_candidates=True)
        yield _Change("LM head", "int8, whole", "int8, candidates", "temperature 0 or top_k up to 64", changed)


def _mtp(setting: Setting) -> Iterator[_Change]:
    now = setting.formats.get(_C.MTP_EXPERTS)
    if now is None or not setting.workload.mtp_drafts:
        return
    if now in _PLAIN:
        how = "build --mtp auto, or --mtp-format int4"
        yield _Change("MTP layer", now, "int4", how, setting.with_formats(_HEAD))
    else:
        changed = setting.with_formats(dict.fromkeys(_HEAD, _F.BF16))
        yield _Change("MTP layer", now, "bf16", "build --mtp keep", changed)


def _drafter(setting: Setting) -> Iterator[_Change]:
    drafter = setting.workload.drafter
    if drafter is None or not setting.workload.drafts:
        return
    for choice in (_F.BF16, _F.FP8, _F.INT4):
        if choice.value != drafter.format and (drafter.format in _PLAIN or choice is _F.BF16):
            other = BlockDrafter.predicted(drafter.spec, choice, WRITTEN_PACKINGS)
            how = "the drafter as published" if choice is _F.BF16 else f"build --drafter {choice.value}"
            yield _Change("drafter", drafter.format, choice.value, how, setting.with_workload(drafter=other))


def _draft_vocabulary(setting: Setting) -> Iterator[_Change]:
    if not setting.workload.mtp_drafts and setting.workload.drafter is None:
        return
    rows, whole = setting.workload.draft_vocab_size, setting.spec.vocab_size
    other = default_draft_vocab_size(whole) if rows is None else None
    if rows == other:  # a vocabulary too small to trim
        return
    how = f"--draft-vocab {'auto' if other else 'full'}"
    changed = setting.with_workload(draft_vocab_size=other)
    yield _Change("LM head for drafts", f"{rows or whole:,} rows", f"{other or whole:,} rows", how, changed)


_LEVERS = (_delta, _states, _attention, _cache, _experts, _shared, _lm_head, _mtp, _drafter, _draft_vocabulary)


_CLASS_OF_PART = {
    "DeltaNet projections": _C.DELTA,
    "attention projections": _C.ATTENTION,
    "routed experts": _C.EXPERTS,
    "shared experts": _C.SHARED,
    "LM head": _C.LM_HEAD,
    "MTP layer": _C.MTP_EXPERTS,
}


def class_of_part(part: str) -> ModuleClass | None:
    """The class whose format is that of a part of a step's bytes; None where there is none."""
    return _CLASS_OF_PART.get(part)


def mtp_head_cost(setting: Setting) -> str | None:
    """A sentence on what an MTP head in BF16 costs a step, and the command that quantises it; None if it has another.

    A model whose own experts are not quantised is none that this concerns.
    """
    if setting.formats.get(_C.EXPERTS, "bf16") in _PLAIN:
        return None
    found = next((_lever(setting.project(), *change) for change in _mtp(setting) if change.now in _PLAIN), None)
    if found is None:
        return None
    now, more = setting.project().engine_rate, f"{found.saved_bytes / 1e9:.2f} GB"
    speeds = ""
    if now is not None and found.tokens_per_second is not None:
        accepted = ", ".join(f"{share:g}" for share in setting.workload.acceptance or ())
        speeds = (
            f": {now.tokens_per_second:.1f} tok/s instead of {found.tokens_per_second:.1f}, projected for "
            f"{setting.box.name} at acceptance {accepted}"
        )
    return (
        f"The MTP head is stored in {found.now}. A step with {setting.workload.drafts} drafts reads {more} more than "
        f"with an INT4 one{speeds}. `onebox build --base DIR --out NEW` quantises it, and `onebox serve --mtp-format "
        "int4` does while loading; answers stay the same."
    )


def assumptions(setting: Setting) -> tuple[str, ...]:
    """What the projected speed of this engine assumes, as clauses."""
    workload, box = setting.workload, setting.box
    accepted = workload.acceptance
    clauses = []
    if workload.drafts:
        clauses.append(f"acceptance {', '.join(f'{share:.3g}' for share in accepted) if accepted else 'not given'}")
    if box.usable:
        clauses.append(f"{box.usable.bytes_per_second / 1e9:,.0f} GB/s")
    clauses.append("experts chosen independently")
    kernels = step_kernels(
        setting.spec, workload.mtp_drafts, setting.formats, workload.drafter if workload.drafts else None
    )
    clauses.append(f"{kernels} kernels at {KERNEL_SECONDS * 1e6:g} us each")
    return tuple(clauses)
