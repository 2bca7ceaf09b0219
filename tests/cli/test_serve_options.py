"""Options of `onebox serve`: keys, hosts and origins, and the directory of prefixes."""

import pytest

from onebox.cli.launch_line import read_launch_line
from onebox.cli.serve_options import HttpOptions, MediaOptions, MemoryOptions, ModelOptions, engine_options
from onebox.engine.api import prefix_disk
from onebox.spec.errors import UsageError


@pytest.mark.parametrize("keys", [[""], ["  "], ["a", ""]])
def test_an_empty_key_is_refused(keys):
    with pytest.raises(UsageError, match="is empty, which would leave the server open"):
        HttpOptions(api_key=keys).settings()


@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_key_in_the_environment_is_refused(run_cli, monkeypatch, value):
    monkeypatch.setenv("ONEBOX_API_KEY", value)
    result = run_cli("serve", "--port", "0")
    assert result.code == 2
    assert "ONEBOX_API_KEY is empty" in result.err


def test_keys_come_from_flags_and_a_file_together(tmp_path):
    (tmp_path / "keys.toml").write_text('[[keys]]\nname = "file"\nkey = "c"')
    settings = HttpOptions(api_key=["a", "b=="], api_key_file=tmp_path / "keys.toml").settings()
    assert [(key.name, key.key) for key in settings.api_keys] == [("key-1", "a"), ("key-2", "b=="), ("file", "c")]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org"])  # noqa: S104 - refused
def test_an_open_server_beyond_this_machine_must_be_asked_for(host):
    with pytest.raises(UsageError, match=f"--host {host} lets other machines .*--api-key.*--allow-open-server"):
        HttpOptions(host=host).settings()
    assert not HttpOptions(host=host, allow_open_server=True).settings().api_keys
    assert HttpOptions(host=host, api_key=["k"]).settings().api_keys


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_server_for_this_machine_needs_no_key(host):
    assert not HttpOptions(host=host).settings().api_keys


@pytest.mark.parametrize("flag", ["allowed_hosts", "allowed_origins"])
def test_lists_of_names_hold_names(flag):
    with pytest.raises(UsageError, match="holds 3; it takes names"):
        HttpOptions(**{flag: "[3]"}).settings()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prefix-dir", "{file}"), "is not a directory"),
        (("--prefix-disk-bytes", "200G"), "--prefix-disk-bytes has nothing to act on without --prefix-dir"),
        (("--prefix-dir", "none", "--prefix-disk-bytes", "1G"), "nothing to act on without --prefix-dir"),
        (("--prefix-dir", "auto", "--no-enable-prefix-caching"), "nothing to act on with --no-enable-prefix-caching"),
        (("--prefix-dir", "auto", "--prefix-disk-bytes", "0"), "Invalid value for '--prefix-disk-bytes'"),
        (("--prefix-dir", "auto", "--prefix-disk-bytes", "much"), "Invalid value for '--prefix-disk-bytes'"),
    ],
)
def test_a_prefix_directory_that_cannot_be_used_is_refused_before_anything_is_loaded(
    run_cli, tmp_path, arguments, words
):
    (tmp_path / "file").write_text("")
    result = run_cli("serve", "--port", "0", *(argument.format(file=tmp_path / "file") for argument in arguments))
    assert result.code == 2
    assert words in result.err.replace("\n", " ")
    assert "config and tokenizer" not in result.out


def test_sizes_of_the_prefix_directory_have_vllms_words(tmp_path):
    options = {"--prefix-dir": True, "--prefix-disk-bytes": True}
    words = [read_launch_line(["--prefix-disk-bytes", text], options).arguments[1] for text in ("200G", "200g", "7")]
    assert words == [str(200 * 2**30), str(200 * 10**9), "7"]
    given = MemoryOptions(prefix_dir=str(tmp_path / "kept"), prefix_disk_bytes=10**9)
    made = prefix_disk(engine_options(ModelOptions(), given, MediaOptions()))
    assert (made.directory, made.max_bytes) == (str(tmp_path / "kept"), 10**9)
    default = prefix_disk(engine_options(ModelOptions(), MemoryOptions(prefix_dir=str(tmp_path)), MediaOptions()))
    assert default.max_bytes == 200 * 10**9
    assert prefix_disk(engine_options(ModelOptions(), MemoryOptions(), MediaOptions())) is None


@pytest.mark.parametrize("flag", ["--kv-transfer-config", "--kv-offloading-size", "--kv-offloading-backend"])
def test_vllms_flags_for_offloading_are_answered_with_ours(flag):
    (refusal,) = read_launch_line([flag, '{"kv_connector":"LMCacheConnectorV1"}'], {}).refusals
    assert "--prefix-dir DIR and --prefix-disk-bytes" in refusal
