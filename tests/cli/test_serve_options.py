"""Options of `onebox serve`: keys, hosts and origins."""

import pytest

from onebox.cli.serve_options import HttpOptions
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
