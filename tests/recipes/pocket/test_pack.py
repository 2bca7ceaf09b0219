"""The pack has whole documents, all held-out ones, and the fonts."""

import tarfile

import numpy as np
from tokenizers import Tokenizer

from recipes.pocket.data.tokens import check_token_files, mark_token_files
from recipes.pocket.pack import pack
from recipes.pocket.training.feed import end_token
from tests.recipes.pocket.toy_pictures import toy_directory


def test_a_pack_holds_the_first_documents_and_everything_held_out(tmp_path):
    end = end_token(toy_directory())
    data = tmp_path / "data"
    for folder in ("tokens", "fonts"):
        (data / folder).mkdir(parents=True)
    documents = np.array([1, 2, end, 3, 4, 5, end, 6, end, 7, end], np.uint16)
    for name in ("prose", "heldout-prose"):
        documents.tofile(data / "tokens" / f"{name}.bin")
    (data / "index.json").write_text("{}")
    mark_token_files(data, Tokenizer.from_file(str(toy_directory() / "tokenizer.json")))
    (data / "fonts" / "a.otf").write_bytes(b"font")
    assert pack(data, toy_directory(), 0.5, tmp_path / "pack.tar.xz") == 7 + 11
    with tarfile.open(tmp_path / "pack.tar.xz") as archive:
        archive.extractall(tmp_path / "there", filter="data")
    there = tmp_path / "there"
    assert np.fromfile(there / "tokens" / "prose.bin", np.uint16).tolist() == documents[:7].tolist()
    assert np.fromfile(there / "tokens" / "heldout-prose.bin", np.uint16).tolist() == documents.tolist()
    assert (there / "fonts" / "a.otf").read_bytes() == b"font"
    assert (there / "index.json").exists()
    check_token_files(there, toy_directory())
