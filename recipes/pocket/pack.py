"""`python -m recipes.pocket.pack --text-share 0.5 --out FILE`: what training needs, in one small file.

For a machine with a GPU and without a network: token files (whole documents, as many as --text-share says, and all
held-out ones), the fonts and fla's wheels, as tar.xz. There: `python -m tarfile -e FILE .pocket`.
"""

import argparse
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from onebox.pocket.ready import MODEL_DIRECTORY
from recipes.pocket.command import log_progress, run_command
from recipes.pocket.data.tokens import INDEX, TOKENIZER_MARK, check_token_files, read_documents
from recipes.pocket.training.feed import end_token

__all__ = ["main", "pack"]


def pack(data: Path, model: Path, text_share: float, out: Path) -> int:
    """Writes `out` from the working directory `data`; returns the number of tokens in it."""
    check_token_files(data, model)
    end, num_tokens = end_token(model), 0
    with tarfile.open(out, "w:xz") as archive:
        for name in (INDEX, TOKENIZER_MARK):
            archive.add(data / name, name)
        for path in sorted((data / "tokens").glob("*.bin")):
            share = 1.0 if path.name.startswith("heldout-") else text_share
            ids = _first_documents(path, end, share)
            num_tokens += len(ids)
            entry = tarfile.TarInfo(f"tokens/{path.name}")
            entry.size = ids.nbytes
            archive.addfile(entry, io.BytesIO(ids.tobytes()))
        for folder in ("fonts", "wheels"):
            if (data / folder).exists():
                archive.add(data / folder, folder)
    return num_tokens


def _first_documents(path: Path, end_token_id: int, share: float) -> "np.ndarray[tuple[int], np.dtype[np.uint16]]":
    """Whole documents from the beginning of a token file; their order in it is random already."""
    documents = read_documents(path, end_token_id)
    kept = documents[: max(1, round(len(documents) * share))]
    return np.concatenate([np.append(ids, np.uint16(end_token_id)) for ids in kept])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes.pocket.pack", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(".pocket"), help="output of `prepare`; default .pocket")
    parser.add_argument("--model", type=Path, default=MODEL_DIRECTORY, help="where the tokenizer is")
    parser.add_argument("--text-share", type=float, default=0.5, help="of each source's documents")
    parser.add_argument("--out", type=Path, default=Path(".pocket/pack.tar.xz"))
    given = parser.parse_args(arguments)
    if not 0 < given.text_share <= 1:
        parser.error("--text-share must be above 0 and at most 1")

    def run() -> int:
        num_tokens = pack(given.data, given.model, given.text_share, given.out)
        log_progress(f"{num_tokens:,} tokens of text; {given.out.stat().st_size / 1e6:.1f} MB")
        return 0

    return run_command(run)


if __name__ == "__main__":
    raise SystemExit(main())
