"""fleet.toml: what is read, and what is refused by name."""

import asyncio
from dataclasses import replace

import httpx
import pytest

from onebox.fleet.config import read_fleet_config
from onebox.fleet.member import Identity, read_identity, refuse_differences, refuse_open
from onebox.spec.errors import MismatchError, OneboxError

MEMBER = '[[member]]\nname = "a"\nurl = "http://10.0.0.1:8000/"\n'


def read(tmp_path, text):
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    return read_fleet_config(path)


def test_a_file_is_read_with_its_defaults(tmp_path):
    (tmp_path / "key").write_text("secret\nmore\n")
    own = '[[member]]\nname = "b"\nstart = "onebox serve \'my dir\' --port {port}"\n'
    config = read(tmp_path, f'[fleet]\napi_key_file = "key"\n{MEMBER}{own}')
    assert (config.router, config.policy, config.url) == ("vllm-router", "cache_aware", "http://127.0.0.1:8080")
    assert config.api_key == "secret"
    assert "secret" not in repr(config)
    first, second = config.members
    assert (first.url, first.is_owned) == ("http://10.0.0.1:8000", False)
    assert second.is_owned
    assert second.command(9) == ["onebox", "serve", "my dir", "--port", "9"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no \\[\\[member\\]\\]"),
        ("fleet = [", "not TOML"),
        (f"[fleet]\nrouters = 1\n{MEMBER}", "routers is not known"),
        (f'[fleet]\nport = "80"\n{MEMBER}', "port is '80'"),
        (f"[fleet]\nport = 70000\n{MEMBER}", "port must be"),
        (f"[fleet]\nhang_s = 0\n{MEMBER}", "hang_s must be above 0"),
        (f'[fleet]\nrouter = "nginx"\n{MEMBER}', "use vllm-router or litellm"),
        (f'[fleet]\npolicy = "cache_lookup"\n{MEMBER}', "vllm-router has cache_aware"),
        (f'[fleet]\napi_key_file = "none"\n{MEMBER}', "cannot be read"),
        (MEMBER + MEMBER, "name a is given twice"),
        ('[[member]]\nname = "a"\n', "needs a url, or a start"),
        ('[[member]]\nname = "a/b"\nurl = "http://x"\n', "name must be given"),
        ('[[member]]\nname = "a"\nurl = "10.0.0.1:8000"\n', "not an http URL"),
        ('[[member]]\nname = "a"\nurl = "http://10.0.0.1:80000"\n', "not an http URL"),
        ('[[member]]\nname = "a"\nstart = "onebox serve"\n', "must have {port}"),
        ('[[member]]\nname = "a"\nstart = "serve \'it --port {port}"\n', "cannot be split into words"),
        (f"[fleet]\nport = 8081\n{MEMBER}", "port and admin_port are both 8081"),
        (f"[fleet]\nhang_s = nan\n{MEMBER}", "hang_s must be above 0"),
        (f"[fleet]\nport = true\n{MEMBER}", "port is True"),
        (f"[fleet]\nallow_open_server = 1\n{MEMBER}", "allow_open_server is 1"),
        (f'[fleet]\napi_key_file = "empty"\n{MEMBER}', "is empty"),
        (f'[fleet]\napi_key_file = "umlaut"\n{MEMBER}', "beyond printable ASCII"),
    ],
)
def test_what_is_wrong_is_refused_by_name(tmp_path, text, said):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "umlaut").write_text("schlüssel\n", encoding="utf-8")
    with pytest.raises(OneboxError, match=said):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("settings", "url", "needs_keys"),
    [
        ("", "http://127.0.0.1:8080", False),
        ('host = "0.0.0.0"', "http://127.0.0.1:8080", True),
        ('host = "::"', "http://[::1]:8080", True),
        ('host = "10.0.0.9"', "http://10.0.0.9:8080", True),
        ('host = "10.0.0.9"\nallow_open_server = true', "http://10.0.0.9:8080", False),
        ('host = "10.0.0.9"\nrouter = "litellm"', "http://10.0.0.9:8080", False),  # it asks for a key itself
    ],
)
def test_members_need_keys_where_other_machines_reach_them(tmp_path, settings, url, needs_keys):
    config = read(tmp_path, f"[fleet]\n{settings}\n{MEMBER}")
    assert (config.url, config.needs_keys) == (url, needs_keys)


def test_a_member_that_asks_for_no_key_is_refused():
    def answer(request):
        return httpx.Response(401 if request.url.host == "closed" and not request.headers["authorization"] else 200)

    async def ask(name):
        headers = {"Authorization": "Bearer secret"}
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), headers=headers) as http:
            await refuse_open(http, name, f"http://{name}")

    asyncio.run(ask("closed"))
    with pytest.raises(OneboxError, match="call open, which asks for no API key"):
        asyncio.run(ask("open"))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("model", "y", "model y is not x"),
        ("fingerprint", "c" * 64, f"fingerprint {'c' * 12} is not {'b' * 12}[.]"),
        ("version", "2", "version 2 is not 1"),
        ("context", 7, "context 7 is not 9"),
    ],
)
def test_a_member_that_differs_from_most_is_named_with_what_differs(field, value, said):
    usual = Identity(model="x", fingerprint="b" * 64, version="1", context=9)
    refuse_differences({"a": usual, "b": usual})
    with pytest.raises(MismatchError, match=f"a is not like the other members: {said}"):
        refuse_differences({"a": replace(usual, **{field: value}), "b": usual, "c": usual})


def test_an_address_without_a_server_of_onebox_is_one_sentence():
    async def ask():
        transport = httpx.MockTransport(lambda _: httpx.Response(404))
        async with httpx.AsyncClient(transport=transport) as http:
            await read_identity(http, "http://box")

    with pytest.raises(OneboxError, match=r"http://box/\S+ answers 404: no server of onebox is there") as error:
        asyncio.run(ask())
    assert "\n" not in str(error.value)
