"""Binds a checkpoint's tensors to the model's modules: how each weight is stored, and all problems.

Fused experts become one bound module per expert whose tensor is a slice of the fused tensor, so that later code need
not distinguish the two. Reads headers only.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.hybrid import HYBRID_KEY, hybrid_contradictions, hybrid_notes
from onebox.checkpoint.source import INDEX_NAME, Checkpoint
from onebox.spec.draft_vocab import D2T_TENSOR, DRAFT_VOCAB_KEY
from onebox.spec.modules import FusedExperts, Module, ModuleClass, fused_experts, modules
from onebox.spec.weights import DTYPE_BITS, INTEGER_BITS, Layout, Stored, identify, plain_layout

__all__ = [
    "Binding",
    "Bound",
    "Problem",
    "ProblemKind",
    "bind",
    "bind_module",
    "duplicate_problems",
    "index_problems",
]

# Activation and KV scales that some tools store with the weights; onebox does not quantise activations below 16 bits.
_UNUSED_SUFFIXES = ("k_scale", "v_scale", "q_scale", "prob_scale")


class ProblemKind(StrEnum):
    """The kind of a problem."""

    MISSING = "missing"
    UNEXPECTED = "unexpected"
    MISSHAPEN = "misshapen"
    DUPLICATE = "duplicate"
    UNINDEXED = "unindexed"
    INDEX = "index"
    MTP = "mtp"
    VALUE = "value"
    UNUSED = "unused"
    SIDE_FILE = "side file"
    CONFIG = "config"
    OTHER_TOOLS = "other tools"
    WIDENED = "widened"


@dataclass(frozen=True)
class Problem:
    """One problem of a checkpoint; the message names the tensor and the fix. Fatal: the checkpoint cannot be served."""

    kind: ProblemKind
    tensor: str
    message: str
    is_fatal: bool = True


@dataclass(frozen=True)
class Bound:
    """A module and the tensors that store it, by suffix; the key of a plain tensor is "weight"."""

    module: Module
    stored: Stored
    tensors: dict[str, TensorEntry]
    fused: TensorEntry | None = None
    """The 3-D tensor of which this expert is a slice, where the checkpoint fuses experts."""

    @property
    def is_plain(self) -> bool:
        return self.stored.layout is Layout.PLAIN

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def is_widened(self) -> bool:
        """Whether a GPU holds it as INT4: fewer bits have kernels for routed experts alone."""
        is_expert = self.module.module_class in (ModuleClass.EXPERTS, ModuleClass.MTP_EXPERTS)
        return not is_expert and INTEGER_BITS.get(self.stored.format, 4) < 4

    @property
    def loaded_bytes(self) -> int:
        """Bytes on a GPU: as stored, unless it is widened."""
        missing = 4 - INTEGER_BITS[self.stored.format] if self.is_widened else 0
        return self.nbytes + self.module.numel * missing // 8


@dataclass
class Binding:
    """The modules found in a checkpoint, by name, in the model's order, and all problems."""

    modules: dict[str, Bound] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    draft_vocab: TensorEntry | None = None
    """The tokens that the MTP head drafts from (`d2t`), where the checkpoint lists them."""

    def of_class(self, *classes: ModuleClass) -> Iterable[Bound]:
        return (bound for bound in self.modules.values() if bound.module.module_class in classes)


def bind(checkpoint: Checkpoint) -> Binding:
    """Binds every tensor of `checkpoint` once; unknown or missing tensors and wrong shapes become problems."""
    wanted = {module.name: module for module in modules(checkpoint.spec)}
    fused = {item.tensor: item for item in fused_experts(checkpoint.spec)}
    found, slices, problems = _sort_tensors(checkpoint, wanted, fused)
    binding = Binding(problems=problems, draft_vocab=checkpoint.tensors.get(D2T_TENSOR))
    for name, module in wanted.items():
        parts, source = found.get(name, {}), None
        if name in slices:
            if parts:
                problems.append(_stored_twice(name, slices[name][1]))
            piece, source = slices[name]
            parts = {"weight": piece}
        if parts:
            bind_module(binding, module, parts, source)
    _report_missing(binding, wanted)
    binding.problems += index_problems(checkpoint.index, checkpoint.tensors)
    config, bound = checkpoint.config, binding.modules
    binding.problems += [Problem(ProblemKind.CONFIG, HYBRID_KEY, text) for text in hybrid_contradictions(config, bound)]
    notes = hybrid_notes(config, bound)
    binding.problems += [Problem(ProblemKind.CONFIG, HYBRID_KEY, text, is_fatal=False) for text in notes]
    return binding


def duplicate_problems(duplicates: dict[str, tuple[str, str]]) -> list[Problem]:
    """Of tensors that are stored twice, by name: the two files of each."""
    return [
        Problem(
            ProblemKind.DUPLICATE,
            name,
            f"{name} is in both {first} and {second}: delete the file that does not belong.",
        )
        for name, (first, second) in duplicates.items()
    ]


Found = dict[str, dict[str, TensorEntry]]
Slices = dict[str, tuple[TensorEntry, TensorEntry]]


def _sort_tensors(
    checkpoint: Checkpoint, wanted: dict[str, Module], fused: dict[str, FusedExperts]
) -> tuple[Found, Slices, list[Problem]]:
    plain = {module.plain_tensor: module for module in wanted.values() if not module.is_matrix}
    found: Found = defaultdict(dict)
    slices: Slices = {}
    problems = duplicate_problems(checkpoint.duplicates)
    for name, entry in checkpoint.tensors.items():
        stem, _, suffix = name.rpartition(".")
        if name in fused:
            problems += _slice_experts(entry, fused[name], slices)
        elif name in plain:
            found[plain[name].name]["weight"] = entry
        elif stem in wanted and wanted[stem].is_matrix:
            found[stem][suffix] = entry
        elif name == D2T_TENSOR:
            problems += _draft_vocab_problems(entry, checkpoint)
        elif suffix in _UNUSED_SUFFIXES:
            note = f"{name} is a scale for the KV cache, which onebox does not use: it computes its own."
            problems.append(Problem(ProblemKind.UNUSED, name, note, is_fatal=False))
        else:
            problems.append(_unexpected(name, stem in wanted))
    return found, slices, problems


def _draft_vocab_problems(entry: TensorEntry, checkpoint: Checkpoint) -> list[Problem]:
    """Of the list of tokens that the MTP head drafts from; its values are read where they are used."""
    if entry.dtype != "I64" or len(entry.shape) != 1 or not 1 <= entry.shape[0] <= checkpoint.spec.vocab_size:
        return [_misshapen(f"{entry.name} is {entry.dtype} {list(entry.shape)} where I64 [tokens] is expected")]
    text = checkpoint.config.get("text_config", checkpoint.config)
    size = text.get(DRAFT_VOCAB_KEY)
    if size == entry.shape[0]:
        return []
    message = (
        f"config.json has {DRAFT_VOCAB_KEY} {size}, but {entry.name} lists {entry.shape[0]:,} tokens: onebox takes "
        "these; `onebox build --base DIR --out NEW` writes both alike."
    )
    return [Problem(ProblemKind.CONFIG, entry.name, message, is_fatal=False)]


def _unexpected(name: str, is_known_module: bool) -> Problem:
    if is_known_module:
        why = "belongs to a module that onebox reads as plain BF16, FP16 or FP32: take this module from a BF16 source"
    else:
        why = "belongs to no module of the model that config.json describes: remove it, or check that config.json fits"
    return Problem(ProblemKind.UNEXPECTED, name, f"{name} {why}.")


def _stored_twice(name: str, fused: TensorEntry) -> Problem:
    message = f"{name} is stored both as its own tensors and inside {fused.name}: keep one of the two."
    return Problem(ProblemKind.DUPLICATE, name, message)


def _slice_experts(entry: TensorEntry, fused: FusedExperts, slices: Slices) -> list[Problem]:
    """Adds one slice per expert and part; a slice consists of whole rows, so its bytes are contiguous."""
    if entry.shape != fused.shape:
        return [_misshapen(f"{entry.name} has shape {list(entry.shape)} where {list(fused.shape)} is expected")]
    experts, rows, columns = fused.shape
    part_rows = rows // len(fused.parts)
    part_bytes = part_rows * columns * DTYPE_BITS[entry.dtype] // 8
    begin = entry.begin
    for expert in range(experts):
        for part in fused.parts:
            name = f"{fused.experts_name}.{expert}.{part}"
            shape = (part_rows, columns)
            piece = TensorEntry(f"{name}.weight", entry.dtype, shape, entry.path, begin, part_bytes)
            slices[name] = (piece, entry)
            begin += part_bytes
    return []


def _misshapen(what: str) -> Problem:
    fix = "the file belongs to another model or is corrupt; download it again or check config.json"
    return Problem(ProblemKind.MISSHAPEN, what.split(" ", 1)[0], f"{what}: {fix}.")


def bind_module(
    binding: Binding, module: Module, parts: dict[str, TensorEntry], fused: TensorEntry | None = None
) -> None:
    """Adds `module`, stored in `parts` by suffix, to the binding, or the problems that stand in the way."""
    stored, problems = _identify(module, parts)
    binding.problems += problems
    if stored is not None:
        binding.modules[module.name] = Bound(module, stored, parts, fused)


def _identify(module: Module, parts: dict[str, TensorEntry]) -> tuple[Stored | None, list[Problem]]:
    if module.is_matrix:
        rows, columns = module.shape
        stored, complaints = identify({suffix: entry.stored for suffix, entry in parts.items()}, rows, columns)
        return stored, [_complaint(module.name, stored, text) for text in complaints]
    entry = parts["weight"]
    stored = plain_layout(entry.stored)
    if stored is None:
        return None, [_misshapen(f"{entry.name} has dtype {entry.dtype} where BF16, F16 or F32 is expected")]
    if entry.shape != module.shape:
        return stored, [
            _misshapen(f"{entry.name} has shape {list(entry.shape)} where {list(module.shape)} is expected")
        ]
    return stored, []


def _complaint(name: str, stored: Stored | None, text: str) -> Problem:
    tensor = f"{name}{text.split(' ', 1)[0]}"
    if " is missing" in text:
        what = f"its {stored.format.value} weight cannot be read without it" if stored else "the module is not there"
        return Problem(ProblemKind.MISSING, tensor, f"{name}{text}: {what}; download the checkpoint again.")
    if " is unexpected" in text:
        return Problem(ProblemKind.UNEXPECTED, tensor, f"{name}{text}: remove it, or check which tool wrote this file.")
    return _misshapen(f"{name}{text}")


def _report_missing(binding: Binding, wanted: dict[str, Module]) -> None:
    """Reports missing modules. The MTP head and the vision tower may be missing as a whole, but not in part."""
    named = {
        problem.tensor.rpartition(".")[0] for problem in binding.problems if problem.kind is not ProblemKind.UNEXPECTED
    }
    absent = [module for name, module in wanted.items() if name not in binding.modules and name not in named]
    for section, classes in _SECTIONS.items():
        of_section = [module for module in wanted.values() if module.module_class in classes]
        gone = [module for module in absent if module.module_class in classes]
        if of_section and len(gone) == len(of_section):
            binding.problems.append(Problem(*_WHOLE_SECTION_ABSENT[section], is_fatal=section == "text"))
        else:
            binding.problems += [_missing(module, section) for module in gone]


_SECTIONS: dict[str, set[ModuleClass]] = {
    "text": {kind for kind in ModuleClass if not kind.in_mtp and kind is not ModuleClass.VISION},
    "mtp": {kind for kind in ModuleClass if kind.in_mtp},
    "vision": {ModuleClass.VISION},
}
_WHOLE_SECTION_ABSENT: dict[str, tuple[ProblemKind, str, str]] = {
    "text": (
        ProblemKind.MISSING,
        "model",
        "No tensor of the language model was found: this directory holds something else.",
    ),
    "mtp": (
        ProblemKind.MTP,
        "mtp",
        "The MTP head (mtp.*) is missing, so onebox decodes without it: graft one with "
        "`onebox build --base DIR --mtp-from OTHER --out NEW`.",
    ),
    "vision": (
        ProblemKind.MISSING,
        "model.visual",
        "The vision tower (model.visual.*) is missing, so images cannot be served: text works.",
    ),
}


def _missing(module: Module, section: str) -> Problem:
    fix = (
        "graft a whole head with `onebox build --mtp-from OTHER`"
        if section == "mtp"
        else "download the checkpoint again"
    )
    kind = ProblemKind.MTP if section == "mtp" else ProblemKind.MISSING
    return Problem(kind, module.plain_tensor, f"{module.plain_tensor} is missing: {fix}.")


def index_problems(index: dict[str, str] | None, tensors: dict[str, TensorEntry]) -> list[Problem]:
    """Where the index file and the shards' headers differ."""
    if index is None:
        return []
    rewrite = "`onebox build --base DIR --out NEW` writes a correct one"
    problems = []
    for name, file in index.items():
        entry = tensors.get(name)
        if entry is None:
            message = f"{name} is listed by {INDEX_NAME} in {file} and is missing: download {file} again."
            problems.append(Problem(ProblemKind.INDEX, name, message))
        elif entry.path.name != file:
            message = f"{name} is in {entry.path.name}, not in {file} as listed in {INDEX_NAME}: {rewrite}."
            problems.append(Problem(ProblemKind.INDEX, name, message, is_fatal=False))
    for name in tensors:
        if name not in index and name != D2T_TENSOR:  # which other tools are to skip
            message = f"{name} is not listed in {INDEX_NAME}: onebox reads it, other tools skip it; {rewrite}."
            problems.append(Problem(ProblemKind.UNINDEXED, name, message, is_fatal=False))
    return problems
