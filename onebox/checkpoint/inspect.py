"""Inspects a checkpoint: the format and bytes of each module class, and all problems.

Reads headers only, without torch; `deep` also reads the values.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from onebox.checkpoint.bind import Binding, Problem, ProblemKind, bind
from onebox.checkpoint.conversion import convert_binding
from onebox.checkpoint.draft_vocab import read_draft_vocab
from onebox.checkpoint.side_files import side_file_problems
from onebox.checkpoint.source import Checkpoint, open_checkpoint
from onebox.checkpoint.stock import stock_limits
from onebox.spec.conversion import AS_STORED, LoadConversion
from onebox.spec.draft_vocab import D2T_TENSOR
from onebox.spec.errors import MismatchError
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass, modules

__all__ = ["ClassRow", "InspectReport", "MtpHeadReport", "inspect_checkpoint", "inspect_opened", "report_on"]


@dataclass(frozen=True)
class ClassRow:
    """One module class of a checkpoint: number of modules per format, and bytes, as stored and on a GPU."""

    module_class: ModuleClass
    formats: dict[str, int]
    nbytes: int
    loaded_bytes: int


@dataclass(frozen=True)
class MtpHeadReport:
    """State of the MTP head. `has_sound_values` is None if values were not read."""

    is_configured: bool
    is_present: bool
    is_complete: bool
    """Every tensor is there and can be read; what the values are is said below."""
    is_indexed: bool
    has_sound_values: bool | None
    num_missing: int = 0
    """Modules of the head without tensors."""
    compared: str | None = None
    """With which of the model's own matrices it was compared; None if it was not."""
    looks_trained: bool | None = None
    """Whether it looks trained, and for this model; None if it was not compared."""
    draft_vocab_size: int | None = None
    """Tokens that it drafts from, as listed in the checkpoint; None: it lists none."""


@dataclass(frozen=True)
class InspectReport:
    """Everything that `onebox inspect` reports."""

    directory: Path
    spec: ModelSpec
    quant_method: str
    num_shards: int
    num_tensors: int
    nbytes: int
    rows: tuple[ClassRow, ...]
    mtp: MtpHeadReport
    problems: tuple[Problem, ...]
    is_deep: bool

    @property
    def is_servable(self) -> bool:
        return not any(problem.is_fatal for problem in self.problems)

    @property
    def class_bytes(self) -> dict[ModuleClass, int]:
        """Bytes of each class on a GPU, which a step reads."""
        return {row.module_class: row.loaded_bytes for row in self.rows}

    @property
    def class_formats(self) -> dict[ModuleClass, str]:
        """The format of each class by name, such as int4; `int3/int4` where there are two."""
        ways = {row.module_class: {way.split()[0] for way in row.formats} for row in self.rows}
        return {kind: "/".join(sorted(names)) for kind, names in ways.items()}


def inspect_checkpoint(
    directory: Path,
    *,
    deep: bool = False,
    on_bytes: Callable[[int], None] = lambda _: None,
    conversion: LoadConversion = AS_STORED,
) -> InspectReport:
    """Opens and binds the checkpoint in `directory`; with a `conversion`, as it is after loading.

    `deep` also reads every value and calls `on_bytes` with the bytes read.
    """
    return inspect_opened(open_checkpoint(directory), deep=deep, on_bytes=on_bytes, conversion=conversion)


def inspect_opened(
    checkpoint: Checkpoint,
    *,
    deep: bool = False,
    on_bytes: Callable[[int], None] = lambda _: None,
    conversion: LoadConversion = AS_STORED,
) -> InspectReport:
    """As `inspect_checkpoint`, of a checkpoint whose headers have been read."""
    binding = bind(checkpoint)
    has_tower = any(bound.module.module_class is ModuleClass.VISION for bound in binding.modules.values())
    binding.problems += side_file_problems(checkpoint.directory, checkpoint.spec, has_tower=has_tower)
    formats = ((bound.module.module_class, bound.stored) for bound in binding.modules.values())
    limits = stock_limits(checkpoint.quantization_config, formats)
    binding.problems += [Problem(ProblemKind.OTHER_TOOLS, "config.json", text, is_fatal=False) for text in limits]
    binding.problems += _widened(binding)
    loaded, _ = convert_binding(binding, conversion)
    if not deep:
        return report_on(checkpoint, loaded, is_deep=False)
    from onebox.checkpoint.values import check_values  # imports torch, which headers do not need

    binding.problems += check_values(binding, on_bytes)
    if binding.draft_vocab and not any(
        problem.tensor == D2T_TENSOR and problem.is_fatal for problem in binding.problems
    ):
        try:
            read_draft_vocab(binding.draft_vocab, checkpoint.spec.vocab_size)
        except MismatchError as error:
            binding.problems.append(Problem(ProblemKind.VALUE, D2T_TENSOR, str(error)))
    report = report_on(checkpoint, loaded, is_deep=True)
    return _judged(report, checkpoint, binding) if report.is_servable and report.mtp.is_complete else report


def _judged(report: InspectReport, checkpoint: Checkpoint, binding: Binding) -> InspectReport:
    """The report with what the head's values look like beside the model's own; all values are finite."""
    from onebox.checkpoint.head import judge_head

    judgement = judge_head(checkpoint, binding)
    mtp = replace(report.mtp, compared=judgement.compared, looks_trained=judgement.complaint is None)
    if judgement.complaint is None:
        return replace(report, mtp=mtp)
    message = (
        f"The MTP head will draft in vain: {judgement.complaint}. Drafts are then rejected, and answers stay right but "
        "come slower than without it: graft the model's own head with `onebox build --base DIR --mtp-from OTHER --out "
        'NEW`, or serve with --speculative-config \'{"method": "ngram"}\'.'
    )
    problem = Problem(ProblemKind.MTP, "mtp", message, is_fatal=False)
    return replace(report, mtp=mtp, problems=(*report.problems, problem))


def report_on(checkpoint: Checkpoint, binding: Binding, *, is_deep: bool) -> InspectReport:
    """The report on a checkpoint that is already bound."""
    quantization = checkpoint.quantization_config or {}
    return InspectReport(
        directory=checkpoint.directory,
        spec=checkpoint.spec,
        quant_method=str(quantization.get("quant_method", "none")),
        num_shards=len(checkpoint.shards),
        num_tensors=len(checkpoint.tensors),
        nbytes=sum(entry.nbytes for entry in checkpoint.tensors.values()),
        rows=_class_rows(binding),
        mtp=_mtp_head(checkpoint, binding, is_deep=is_deep),
        problems=tuple(sorted(binding.problems, key=lambda problem: not problem.is_fatal)),
        is_deep=is_deep,
    )


def _class_rows(binding: Binding) -> tuple[ClassRow, ...]:
    formats: dict[ModuleClass, Counter[str]] = {kind: Counter() for kind in ModuleClass}
    nbytes: Counter[ModuleClass] = Counter()
    loaded: Counter[ModuleClass] = Counter()
    for bound in binding.modules.values():
        formats[bound.module.module_class][str(bound.stored)] += 1
        nbytes[bound.module.module_class] += bound.nbytes
        loaded[bound.module.module_class] += bound.loaded_bytes
    return tuple(
        ClassRow(kind, dict(formats[kind]), nbytes[kind], loaded[kind]) for kind in ModuleClass if formats[kind]
    )


def _widened(binding: Binding) -> Iterator[Problem]:
    """A note on matrices that take more memory than their files say."""
    bounds = [bound for bound in binding.modules.values() if bound.is_widened]
    if bounds:
        more = sum(bound.loaded_bytes - bound.nbytes for bound in bounds)
        text = (
            f"{len(bounds):,} matrices that are no routed experts, such as {bounds[0].module.name}, have fewer than 4 "
            f"bits: a GPU holds them as INT4, the same values in {more / 1e9:.3f} GB more than is stored."
        )
        yield Problem(ProblemKind.WIDENED, bounds[0].module.name, text, is_fatal=False)


def _mtp_head(checkpoint: Checkpoint, binding: Binding, *, is_deep: bool) -> MtpHeadReport:
    wanted = {module.name for module in modules(checkpoint.spec) if module.module_class.in_mtp}
    found = {name for name in wanted if name in binding.modules}
    of_mtp = [problem for problem in binding.problems if problem.tensor.startswith("mtp")]
    unreadable = [problem for problem in of_mtp if problem.is_fatal and problem.kind is not ProblemKind.VALUE]
    return MtpHeadReport(
        is_configured=bool(wanted),
        is_present=bool(found),
        is_complete=bool(found) and found == wanted and not unreadable,
        is_indexed=bool(found) and not any(problem.kind is ProblemKind.UNINDEXED for problem in of_mtp),
        has_sound_values=not any(problem.kind is ProblemKind.VALUE for problem in of_mtp)
        if is_deep and found
        else None,
        num_missing=len(wanted - found),
        draft_vocab_size=binding.draft_vocab.shape[0] if binding.draft_vocab and binding.draft_vocab.shape else None,
    )
