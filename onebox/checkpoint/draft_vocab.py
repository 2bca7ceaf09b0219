"""A checkpoint's own draft vocabulary: the tensor `mtp.d2t`, int64 [D], read without torch.

A build writes it to a file of its own that the index does not name, which other tools therefore skip: vLLM's MTP loader
stops at a tensor that it does not know.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from onebox.checkpoint.header import TensorEntry
from onebox.checkpoint.source import read_tensor
from onebox.spec.draft_vocab import D2T_TENSOR, d2t_offsets, tokens_of_d2t
from onebox.spec.errors import MismatchError, UsageError
from onebox.spec.modules import ModuleClass
from onebox.spec.weights import StoredTensor

if TYPE_CHECKING:
    from onebox.checkpoint.convert import Unit
    from onebox.checkpoint.recipe import ModuleChoice
    from onebox.checkpoint.rounding import TensorChunk

__all__ = ["DRAFT_VOCAB_FILE", "chosen_draft_vocab", "draft_vocab_unit", "read_draft_vocab"]

DRAFT_VOCAB_FILE = "draft_vocab.safetensors"


def read_draft_vocab(entry: TensorEntry, vocab_size: int) -> tuple[int, ...]:
    """The token of each draft index; refused where one is beyond the vocabulary or listed twice."""
    offsets = array("q", bytes(read_tensor(entry)))
    tokens = tokens_of_d2t(offsets)
    beyond = next((token_id for token_id in tokens if not 0 <= token_id < vocab_size), None)
    if beyond is not None:
        raise MismatchError(f"{entry.name} lists token {beyond}, which is not one of {vocab_size:,}: build it again.")
    if len(set(tokens)) < len(tokens):
        raise MismatchError(f"{entry.name} lists a token twice: build it again.")
    return tuple(tokens)


def chosen_draft_vocab(asked: Sequence[int] | None, choices: "list[ModuleChoice]") -> tuple[int, ...]:
    """The list of a build's output: as asked, else that of the checkpoint which gives the MTP head; empty: none."""
    source = next((choice.source for choice in choices if choice.module.module_class is ModuleClass.MTP_FC), None)
    if source is None:
        if asked:
            raise UsageError("--draft-vocab has nothing to act on: no source holds an MTP head; name one that does.")
        return ()
    if asked is not None:
        return tuple(asked)
    entry = source.binding.draft_vocab
    return read_draft_vocab(entry, source.checkpoint.spec.vocab_size) if entry else ()


def draft_vocab_unit(token_ids: tuple[int, ...]) -> "Unit":
    """The list as a unit of the output."""
    from onebox.checkpoint.convert import OutputTensor, Unit
    from onebox.checkpoint.recipe import Action

    tensor = OutputTensor(D2T_TENSOR, StoredTensor("I64", (len(token_ids),)))

    def make() -> "Iterator[TensorChunk]":
        yield 0, memoryview(array("q", d2t_offsets(token_ids)).tobytes())

    return Unit((tensor,), Action.LIST, ModuleClass.MTP_SMALL, "draft vocabulary", make)
