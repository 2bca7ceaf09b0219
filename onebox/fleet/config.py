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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from onebox.spec.errors import UnreadableError, UsageError

__all__ = ["PORT_MARK", "ROUTERS", "FleetConfig", "MemberConfig", "read_fleet_config"]

PORT_MARK = "{port}"
ROUTERS: Mapping[str, tuple[str, ...]] = {
    "vllm-router": ("cache_aware", "power_of_two", "consistent_hash", "round_robin", "random"),
    "litellm": ("cache_lookup", "simple-shuffle", "least-busy"),
}
"""Routers and their policies, the default first. `cache_lookup` asks the members' /v1/cache/lookup."""


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
    balance: int = 4
    """vllm-router: so many requests more than the least loaded member has, and load counts for more than prefixes."""

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

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
        settings[name] = tuple(shlex.split(settings.get(name, "")))
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
    for name in ("start_s", "hang_s", "drain_s", "poll_s", "balance"):
        if getattr(config, name) <= 0:
            raise UsageError(f"{config.path}: {name} must be above 0.")
    return FleetConfig(**{**config.__dict__, "policy": policy})


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
    if url and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
        raise UsageError(f"{path}: {where}url is {url!r}, which is not an http URL.")
    command = tuple(shlex.split(start or ""))
    if command and not any(PORT_MARK in part for part in command):
        raise UsageError(f"{path}: {where}start must have {PORT_MARK} where the server's port goes.")
    return MemberConfig(name, url.rstrip("/") if url else None, command)


def _refuse_unknown(path: Path, where: str, table: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for key, value in table.items():
        if key not in known:
            raise UsageError(f"{path}: {where}{key} is not known; there are {', '.join(known)}.")
        if not isinstance(value, known[key]) or isinstance(value, bool):
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
        return file.read_text(encoding="utf-8").split("\n", 1)[0].strip()
    except OSError as error:
        raise UnreadableError(f"{path}: api_key_file {file} cannot be read ({error.strerror}).") from None
