"""`onebox cache`: what it says of a directory, what it changes, and that a running server copes."""

import json

import pytest

from benchmarks.prefix_store.making import files_in, keys_of, opened, read_back, store
from onebox.store.chunk import BLOCK_BYTES, ChunkError

PARTS = {"model": "pocket", "kv_format": "fp8"}
KEYS = [keys_of(seed, 40, 16) for seed in range(3)]


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "prefixes"
    directory = opened(root, parts=PARTS)
    for keys in KEYS:
        store(directory, keys)
    directory.close()
    old = opened(root, parts={"model": "old"})
    store(old, keys_of(9, 5))
    old.close()
    return root


def flip(root, keys):
    """Damages the last KV chunk of an entry."""
    path = next(root.rglob(f"{keys[-1].hex()}-kv08"))
    data = bytearray(path.read_bytes())
    data[BLOCK_BYTES] ^= 1
    path.write_bytes(data)
    return path


def test_ls_shows_every_family_and_entry(root, run_cli):
    key = KEYS[1][-1].hex()
    assert run_cli("cache", "pin", key[:8], "--dir", root).out == f"{key} is pinned.\n"
    server = opened(root, parts=PARTS)
    found = json.loads(run_cli("cache", "ls", "--dir", root, "--json").out)
    families = {family["parts"]["model"]: family for family in found["families"]}
    assert {name: family["is_in_use"] for name, family in families.items()} == {"pocket": True, "old": False}
    entries = families["pocket"]["entries"]
    assert {entry["key"] for entry in entries} == {keys[-1].hex() for keys in KEYS}
    assert [entry["key"] for entry in entries if entry["is_pinned"]] == [key]
    assert {entry["num_tokens"] for entry in entries} == {2560}
    assert all(entry["own_bytes"] < entry["num_bytes"] for entry in entries)
    assert families["pocket"]["num_bytes"] == server.stats().num_bytes
    table = run_cli("cache", "ls", "--dir", root).out
    assert "pinned" in table
    assert "kv_format: fp8" in table
    assert all(keys[-1].hex()[:16] in table for keys in KEYS)
    assert server.fingerprint in table


def test_ls_of_one_family(root, run_cli):
    name = next(path.name for path in root.iterdir() if path.is_dir())
    found = json.loads(run_cli("cache", "ls", "--dir", root, "--family", name[:6], "--json").out)
    assert [family["fingerprint"] for family in found["families"]] == [name]


def test_stat_adds_up(root, run_cli):
    found = json.loads(run_cli("cache", "stat", "--dir", root, "--json").out)
    assert found["total"]["num_entries"] == 4
    assert found["total"]["num_tokens"] == 3 * 2560 + 320
    files = [path for path in root.rglob("*") if path.is_file() and {"entries", "chunks"} & set(path.parts)]
    assert found["total"]["num_bytes"] == sum(path.stat().st_size for path in files)
    assert "4 entries" in run_cli("cache", "stat", "--dir", root).out


def test_verify_tells_damage_by_its_status_and_removes_it(root, run_cli):
    assert run_cli("cache", "verify", "--dir", root).code == 0
    path = flip(root, KEYS[0])
    result = run_cli("cache", "verify", "--dir", root, "--json")
    assert result.code == 1
    problem = json.loads(result.out)["problems"][0]
    assert (problem["path"], problem["reason"], problem["keys"]) == (str(path), "digest", [KEYS[0][-1].hex()])
    removed = run_cli("cache", "verify", "--dir", root, "--remove")
    assert removed.code == 1
    assert "1 damaged entry removed" in removed.out
    assert run_cli("cache", "verify", "--dir", root).code == 0
    directory = opened(root, parts=PARTS)
    assert [directory.has(keys[-1]) for keys in KEYS] == [False, True, True]
    for keys in KEYS[1:]:
        read_back(directory, directory.find(keys))


def test_an_entry_file_that_cannot_be_read_is_a_problem(root, run_cli):
    path = root / opened(root, parts=PARTS).fingerprint / "entries" / KEYS[0][-1].hex()
    path.write_bytes(path.read_bytes()[:-1])
    assert "1 entry cannot be read" in run_cli("cache", "ls", "--dir", root).out
    result = run_cli("cache", "verify", "--dir", root, "--remove")
    assert result.code == 1
    assert str(path) in result.out
    assert not path.exists()


def test_rm_of_a_key_keeps_what_others_share(root, run_cli):
    server = opened(root, parts=PARTS)
    result = run_cli("cache", "rm", KEYS[0][-1].hex()[:10], "--dir", root)
    assert "1 entry removed" in result.out
    reading = server.find(KEYS[0])  # the server does not know yet: a miss, and no damage
    with pytest.raises(ChunkError, match="was removed"):
        read_back(server, reading)
    assert server.find(KEYS[0]) is None
    for keys in KEYS[1:]:
        read_back(server, server.find(keys))
    store(server, KEYS[0])
    read_back(server, server.find(KEYS[0]))


def test_rm_of_all_leaves_nothing_but_the_lock(root, run_cli):
    assert "4 entries removed" in run_cli("cache", "rm", "--all", "--dir", root).out
    assert files_in(root) == ["CACHEDIR.TAG", "lock"]
    assert "holds no prefixes" in run_cli("cache", "ls", "--dir", root).out


def test_rm_of_all_under_a_running_server_is_a_miss_for_it(root, run_cli):
    server = opened(root, parts=PARTS)
    assert run_cli("cache", "rm", "--all", "--dir", root).code == 0
    store(server, KEYS[0])
    read_back(server, server.find(KEYS[0]))
    assert server.find(KEYS[1]) is None  # writing has looked at what is there


def test_rm_of_a_family(root, run_cli):
    server = opened(root, parts=PARTS)
    server.close()
    result = run_cli("cache", "rm", "--family", server.fingerprint[:7], "--dir", root, "--json")
    assert json.loads(result.out)["num_removed"] == 3
    assert not (root / server.fingerprint).exists()


def test_unpin_says_what_it_did(root, run_cli):
    key = KEYS[0][-1].hex()
    run_cli("cache", "pin", key, "--dir", root)
    assert "no longer pinned" in run_cli("cache", "unpin", key, "--dir", root).out
    assert "was not pinned" in run_cli("cache", "unpin", key, "--dir", root).out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("rm",), "one of the three"),
        (("rm", "--all", "--family", "ab"), "one of the three"),
        (("rm", "abc"), "too short"),
        (("rm", "abcdef"), "No entry"),
        (("rm", "--family", "zz"), "No families"),
        (("pin", "abcdef"), "No entry"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(root, run_cli, arguments, sentence):
    before = files_in(root)
    result = run_cli("cache", *arguments, "--dir", root)
    assert result.code == 2
    assert sentence in result.err
    assert files_in(root) == before


def test_a_directory_that_is_not_there_is_a_sentence(tmp_path, run_cli, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = run_cli("cache", "ls")
    assert result.code == 2
    assert f"No prefixes are kept in {tmp_path}/onebox/prefixes" in result.err
    assert "cannot be listed" in run_cli("cache", "ls", "--dir", tmp_path / "none").err


def test_without_dir_it_is_the_servers_default(tmp_path, run_cli, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store(opened(tmp_path / "onebox" / "prefixes"), keys_of(1, 5))
    assert json.loads(run_cli("cache", "stat", "--json").out)["total"]["num_entries"] == 1
