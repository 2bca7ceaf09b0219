"""Parts of a checkpoint: which tensors a build takes from a source, and sources that hold no more than those."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from onebox.checkpoint.bind import Binding, Problem, ProblemKind, bind
from onebox.checkpoint.source import Checkpoint
from onebox.spec.draft_vocab import D2T_TENSOR
from onebox.spec.errors import UsageError
from onebox.spec.model import ModelSpec
from onebox.spec.modules import ModuleClass, fused_experts, modules

__all__ = ["MTP_CLASSES", "PART_WORDS", "classes_named", "narrow", "sample_norms", "tensors_of", "words_for"]

MTP_CLASSES = frozenset(kind for kind in ModuleClass if kind.in_mtp)
PART_WORDS: dict[str, frozenset[ModuleClass]] = {
    "experts": frozenset({ModuleClass.EXPERTS}),
    "attention": frozenset({ModuleClass.ATTENTION, ModuleClass.DELTA}),
    "delta": frozenset({ModuleClass.DELTA}),
    "shared": frozenset({ModuleClass.SHARED}),
    "lm-head": frozenset({ModuleClass.LM_HEAD}),
    "mtp": MTP_CLASSES,
}
"""Module classes by the word that `onebox build` has for them."""
_NUM_NORMS = 24
_ABSENCES = (ProblemKind.MISSING, ProblemKind.INDEX, ProblemKind.MTP)


def classes_named(words: Iterable[str]) -> frozenset[ModuleClass]:
    """The module classes of the words that `onebox pull --only` takes."""
    chosen: set[ModuleClass] = set()
    for word in words:
        if word not in PART_WORDS:
            raise UsageError(f"{word!r} is no part of a checkpoint: --only takes {', '.join(PART_WORDS)}.")
        chosen |= PART_WORDS[word]
    return frozenset(chosen)


def words_for(classes: Iterable[ModuleClass]) -> list[str]:
    """Few words that name all of `classes`, and nothing else where that is possible."""
    left, words = set(classes), []
    for word in sorted(PART_WORDS, key=lambda word: (not PART_WORDS[word] <= left, -len(PART_WORDS[word]))):
        if left & PART_WORDS[word]:
            words.append(word)
            left -= PART_WORDS[word]
    return words


def class_finder(spec: ModelSpec) -> Callable[[str], ModuleClass | None]:
    """A function from a tensor's name, in any storage format, to the class of its module; None if it has none."""
    matrices, others = {}, {item.tensor: item.module_class for item in fused_experts(spec)}
    others[D2T_TENSOR] = ModuleClass.MTP_SMALL
    for module in modules(spec):
        if module.is_matrix:
            matrices[module.name] = module.module_class
        else:
            others[module.plain_tensor] = module.module_class

    def find(name: str) -> ModuleClass | None:
        return others.get(name) or matrices.get(name.rpartition(".")[0])

    return find


def tensors_of(spec: ModelSpec, names: Iterable[str], classes: Iterable[ModuleClass]) -> set[str]:
    """Those of `names` that store modules of `classes`."""
    find, wanted = class_finder(spec), set(classes)
    return {name for name in names if find(name) in wanted}


def sample_norms(spec: ModelSpec, names: Iterable[str]) -> set[str]:
    """A few of `names`, spread over the model's depth, by which a build tells that two checkpoints are one model."""
    present = set(names)
    norms = [
        module.plain_tensor
        for module in modules(spec)
        if module.module_class is ModuleClass.SMALL and len(module.shape) == 1 and module.plain_tensor in present
    ]
    return set(norms[:: max(1, len(norms) // _NUM_NORMS)])


def narrow(checkpoint: Checkpoint, binding: Binding, uses: frozenset[ModuleClass]) -> tuple[Checkpoint, Binding]:
    """A source of which only `uses` are needed: what is merely absent elsewhere is no problem of it.

    Returns both unchanged if all is there, or if anything is wrong other than an absence.
    """
    fatal = [problem for problem in binding.problems if problem.is_fatal]
    lost = {name.rpartition(".")[0] for name in checkpoint.index or {} if name not in checkpoint.tensors}
    if not fatal or not all(problem.kind in _ABSENCES or _module_of(problem) & lost for problem in fatal):
        return checkpoint, binding
    find = class_finder(checkpoint.spec)
    kept = {*uses, ModuleClass.SMALL}
    # The other shard of a weight whose parts two shards hold may be absent: neither part is bound then.
    tensors = {name: entry for name, entry in checkpoint.tensors.items() if find(name) in kept}
    index = checkpoint.index
    if index is not None:
        index = {name: file for name, file in index.items() if find(name) in uses or name in tensors}
    narrowed = replace(checkpoint, tensors=tensors, index=index)
    bound = bind(narrowed)
    wanted = {module.name for module in modules(checkpoint.spec) if module.module_class in uses}
    is_head_alone = uses <= MTP_CLASSES and any(bound.of_class(*MTP_CLASSES))
    bound.problems = [
        problem
        for problem in bound.problems
        # "model": not one tensor of the language model is there.
        if not problem.is_fatal or (not is_head_alone if problem.tensor == "model" else _module_of(problem) & wanted)
    ]
    # The file that is missing says more than the tensors that are incomplete without it.
    bound.problems.sort(key=lambda problem: problem.kind is not ProblemKind.INDEX)
    return narrowed, bound


def _module_of(problem: Problem) -> set[str]:
    """The names that the module of a problem may have: that of its tensor, with and without a suffix."""
    return {problem.tensor, problem.tensor.rpartition(".")[0]}
