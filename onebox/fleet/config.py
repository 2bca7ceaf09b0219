"""fleet.toml: the members, the router in front of them, and where it all listens.

    [fleet]
    router = "vllm-router"              # or "litellm"
    host = "127.0.0.1"
    port = 8080                         # of the router: the address that clients use
    admin_port = 8081                   # of the page, of status, drain and roll; always on 127.0.0.1
    policy = "cache_aware"              # one of the router's own policies
    api_key_file = "key"                # the members' API key, where they ask for one; relative to the file

    [[member]]
    name = "box-1"
    url = "http://10.0.0.11:8000"       # runs already, and is left alone

    [[member]]
    name = "box-2"
    start = "onebox serve /models/hybrid --port {port}"      # the fleet's own: started, restarted and stopped by it

Unknown keys and wrong values are errors that name file and key.
"""

import os
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from onebox.spec.addresses import is_loopback
from onebox.spec.authorization import is_sendable
from onebox.spec.errors import UnreadableError, UsageError

__all__ = ["PORT_MARK", "ROUTERS", "FleetConfig", "MemberConfig", "read_fleet_config"]

PORT_MARK = "{port}"
ROUTERS: Mapping[str, tuple[str, ...]] = {
    "vllm-router": ("cache_aware", "power_of_two", "consistent_hash", "round_robin", "random"),
    "litellm": ("cache_lookup", "session_affinity", "simple-shuffle", "least-busy"),
}
"""Routers and their policies, the default first. `cache_lookup` asks the members' /v1/cache/lookup; with
`session_affinity` and `consistent_hash` requests with one x-session-id header have one member."""
_FROM_HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, not listened on
"""Where a server that listens on every address of this machine is called from it."""


@dataclass(frozen=True)
class MemberConfig:
    """One server. Without `start` it runs already, and is neither started nor stopped by the fleet."""

    name: str
    url: str | None = None
    start: tuple[str, ...] = ()
    """A command with {port} in it; the server listens on 127.0.0.1 there, or where `url` says."""

    @property
    def is_owned(self) -> bool:
        return bool(self.start)

    def command(self, port: int) -> list[str]:
        return [part.replace(PORT_MARK, str(port)) for part in self.start]


@dataclass(frozen=True)
class FleetConfig:
    """The file, read and checked. Times in seconds."""

    path: Path
    members: tuple[MemberConfig, ...]
    router: str = "vllm-router"
    policy: str = ""
    host: str = "127.0.0.1"
    port: int = 8080
    admin_port: int = 8081
    router_command: tuple[str, ...] = ()
    """The router's program, where it is not beside Python or on the PATH."""
    router_options: tuple[str, ...] = ()
    """Further options of the router's program, as they are."""
    api_key: str = field(default="", repr=False)
    start_s: float = 900.0
    """How long a member that the fleet starts may take until it is healthy."""
    hang_s: float = 20.0
    """A member whose /health is not answered for so long is hung: what waits for it is answered by others."""
    drain_s: float = 600.0
    """How long running requests may take when a member is drained or replaced."""
    poll_s: float = 1.0
    """Between two looks at a member."""
    allow_open_server: bool = False
    """Members that ask for no key may be reached from other machines."""
    balance: int = 4
    """vllm-router: so many requests more than the least loaded member has, and load counts for more than prefixes."""

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def url(self) -> str:
        """The router's, from this machine."""
        host = _FROM_HERE.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def listens_everywhere(self) -> bool:
        return self.host in _FROM_HERE

    @property
    def needs_keys(self) -> bool:
        """Whether members must ask for a key: other machines reach them through the router, which asks for none."""
        return self.router != "litellm" and not self.allow_open_server and not is_loopback(self.host)

    def member(self, name: str) -> MemberConfig:
        for member in self.members:
            if member.name == name:
                return member
        raise UsageError(f"{self.path} has no member {name!r}; it has {', '.join(m.name for m in self.members)}.")


_FLEET_KEYS: Mapping[str, type | tuple[type, ...]] = {
    "router": str,
    "policy": str,
    "host": str,
    "port": int,
    "admin_port": int,
    "router_command": str,
    "router_options": str,
    "api_key_file": str,
    "start_s": (int, float),
    "hang_s": (int, float),
    "drain_s": (int, float),
    "poll_s": (int, float),
    "balance": int,
    "allow_open_server": bool,
}
_MEMBER_KEYS: Mapping[str, type | tuple[type, ...]] = {"name": str, "url": str, "start": str}


def read_fleet_config(path: Path) -> FleetConfig:
    """Reads and checks a file."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read ({error.strerror}); name a fleet file with --config.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{path} is not TOML ({error}).") from None
    _refuse_unknown(path, "", content, {"fleet": dict, "member": list})
    settings = dict(content.get("fleet", {}))
    _refuse_unknown(path, "[fleet] ", settings, _FLEET_KEYS)
    members = tuple(_member(path, number, table) for number, table in enumerate(content.get("member", ()), 1))
    if not members:
        raise UsageError(f"{path} has no [[member]]: give at least one, with a name and a url or a start.")
    _refuse_repeated(path, members)
    for name in ("router_command", "router_options"):
        settings[name] = _words(path, f"[fleet] {name}", settings.get(name, ""))
    settings["api_key"] = _api_key(path, settings.pop("api_key_file", None))
    config = FleetConfig(path, members, **settings)
    return _with_policy(config)


def _with_policy(config: FleetConfig) -> FleetConfig:
    if config.router not in ROUTERS:
        raise UsageError(f"{config.path}: router is {config.router!r}; use {' or '.join(ROUTERS)}.")
    policies = ROUTERS[config.router]
    policy = config.policy or policies[0]
    if policy not in policies:
        raise UsageError(f"{config.path}: policy is {policy!r}; {config.router} has {', '.join(policies)}.")
    for name in ("port", "admin_port"):
        if not 0 < getattr(config, name) < 65536:
            raise UsageError(f"{config.path}: {name} must be from 1 to 65535.")
    if config.port == config.admin_port:
        raise UsageError(f"{config.path}: port and admin_port are both {config.port}; give two.")
    for name in ("start_s", "hang_s", "drain_s", "poll_s", "balance"):
        if not getattr(config, name) > 0:  # NaN is not
            raise UsageError(f"{config.path}: {name} must be above 0.")
    return replace(config, policy=policy)


def _member(path: Path, number: int, table: Any) -> MemberConfig:
    where = f"[[member]] {number}: "
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {where}it must be a table.")
    _refuse_unknown(path, where, table, _MEMBER_KEYS)
    name, url, start = table.get("name"), table.get("url"), table.get("start")
    if not name or not all(letter.isalnum() or letter in "-_." for letter in name):
        raise UsageError(f"{path}: {where}name must be given, of letters, digits, '-', '_' and '.'.")
    if not url and not start:
        raise UsageError(f"{path}: {where}{name} needs a url, or a start that the fleet runs.")
    if url and not _is_http(url):
        raise UsageError(f"{path}: {where}url is {url!r}, which is not an http URL.")
    command = _words(path, f"{where}start", start or "")
    if command and not any(PORT_MARK in part for part in command):
        raise UsageError(f"{path}: {where}start must have {PORT_MARK} where the server's port goes.")
    return MemberConfig(name, url.rstrip("/") if url else None, command)


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or too large
        return False


def _words(path: Path, where: str, text: str) -> tuple[str, ...]:
    """A command line as a shell splits it."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{path}: {where} is {text!r}, which cannot be split into words ({error}).") from None


def _refuse_unknown(path: Path, where: str, table: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for key, value in table.items():
        if key not in known:
            raise UsageError(f"{path}: {where}{key} is not known; there are {', '.join(known)}.")
        if not isinstance(value, known[key]) or (isinstance(value, bool) and known[key] is not bool):
            raise UsageError(f"{path}: {where}{key} is {value!r}, which has the wrong type.")


def _refuse_repeated(path: Path, members: tuple[MemberConfig, ...]) -> None:
    for what in ("name", "url"):
        given = [value for member in members if (value := getattr(member, what))]
        if twice := {value for value in given if given.count(value) > 1}:
            raise UsageError(f"{path}: the {what} {min(twice)} is given twice.")


def _api_key(path: Path, name: str | None) -> str:
    """The first line of the file; a path in it is relative to the fleet's file, and ~ is the user's home."""
    if name is None:
        return ""
    file = path.parent / os.path.expanduser(name)  # noqa: PTH111 - joined as a text, so that an absolute one wins
    try:
        key = file.read_text(encoding="utf-8").split("\n", 1)[0].strip()
    except OSError as error:
        raise UnreadableError(f"{path}: api_key_file {file} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise UnreadableError(f"{path}: api_key_file {file} is no text; its first line must be a key.") from None
    if not key:
        raise UnreadableError(f"{path}: the first line of api_key_file {file} is empty; write the members' key there.")
    if not is_sendable(key):
        raise UnreadableError(
            f"{path}: the first line of api_key_file {file} has spaces or characters beyond printable ASCII, which no "
            "header carries; write one key there."
        )
    return key
