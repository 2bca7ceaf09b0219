"""Two machines on one: network namespaces with an address each, joined by a bridge, and an sshd in each."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "ip"
KEYGEN = shutil.which("ssh-keygen") or "ssh-keygen"
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


class Machines(NamedTuple):
    """Their addresses, and the ssh command that reaches them."""

    addresses: tuple[str, str]
    ssh: str


def why_not() -> str | None:
    """Why namespaces cannot be made here; None: they can."""
    if os.geteuid() != 0 or not Path(IP).is_absolute():
        return "network namespaces need root and iproute2"
    name = f"onebox-try-{os.getpid()}"
    done = subprocess.run([IP, "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run([IP, "netns", "del", name], capture_output=True, check=False)
    return f"network namespaces are not permitted: {done.stderr.strip()}" if done.returncode else None


def ip(*words: str) -> None:
    subprocess.run([IP, *words], check=True, capture_output=True)


@contextlib.contextmanager
def machines(root: Path) -> Iterator[Machines]:
    """Two namespaces; what is left in them is killed at the end."""
    mark = f"{os.getpid() % 10000:04}"
    network = f"10.221.{os.getpid() % 250}"
    names = [f"obx{mark}n{number}" for number in (1, 2)]
    bridge = f"obx{mark}"
    addresses = (f"{network}.1", f"{network}.2")
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", f"{network}.254/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for number, (name, address) in enumerate(zip(names, addresses, strict=True), 1):
            ip("netns", "add", name)
            ip("link", "add", f"obx{mark}v{number}", "type", "veth", "peer", "name", "fab0", "netns", name)
            ip("link", "set", f"obx{mark}v{number}", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "fab0")
            ip("-n", name, "link", "set", "fab0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield Machines(addresses, _ssh(root, names, addresses))
    finally:
        for name in names:
            found = subprocess.run([IP, "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in found.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run([IP, "netns", "del", name], capture_output=True, check=False)
        subprocess.run([IP, "link", "del", bridge], capture_output=True, check=False)


def _ssh(root: Path, names: list[str], addresses: tuple[str, str]) -> str:
    """OpenSSH to a daemon in each namespace; without one installed, a script that enters the namespace instead."""
    if SSHD is None:
        script = root / "enter"
        cases = "".join(f"{address}) name={name};; " for name, address in zip(names, addresses, strict=True))
        script.write_text(f'#!/bin/sh\ncase $1 in {cases}esac\nexec ip netns exec "$name" sh -c "$2"\n')
        script.chmod(0o755)
        return str(script)
    for key in ("key", "host_key"):
        subprocess.run([KEYGEN, "-q", "-t", "ed25519", "-N", "", "-f", str(root / key)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    for name, address in zip(names, addresses, strict=True):
        settings = {
            "ListenAddress": address,
            "Port": 2222,
            "HostKey": root / "host_key",
            "AuthorizedKeysFile": root / "key.pub",
            "PidFile": root / f"{name}.pid",
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
        }
        (root / f"{name}.conf").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        subprocess.run([IP, "netns", "exec", name, SSHD, "-f", str(root / f"{name}.conf")], check=True)
    options = {
        "BatchMode": "yes",
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
        "LogLevel": "ERROR",
        "ServerAliveInterval": "5",
    }
    words = ["ssh", "-T", "-F", "none", "-i", str(root / "key"), "-p", "2222"]
    line = shlex.join([*words, *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))])
    end = time.monotonic() + 30
    while any(subprocess.run([*shlex.split(line), one, "true"], check=False).returncode for one in addresses):
        assert time.monotonic() < end, "sshd did not come up"
        time.sleep(0.2)
    return line
