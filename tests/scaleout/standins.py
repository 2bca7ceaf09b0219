"""Stand-ins for two boxes: a sysfs as a Spark has it, an `ssh` that runs commands here, a `vllm` with /health alone.

The real programs are used in tests/vllm.
"""

import os
import sys
from pathlib import Path

# $1.. are the options and the host; the last word is the command. Each host has its own addresses and its own sysfs.
_SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
export STANDIN_HOST=$1
case $1 in down*) echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255;; esac
exec sh -c "$2"
"""
_IP = """#!/bin/sh
cat "$STANDIN_ROOT/$STANDIN_HOST/addresses" 2>/dev/null || echo "1: lo    inet 127.0.0.1/8 scope host lo"
"""
_VLLM = """#!{python}
import http.server, json, os, pathlib, signal, sys, time
root, host = pathlib.Path(os.environ["STANDIN_ROOT"]), os.environ["STANDIN_HOST"]
shown = {{name: os.environ[name] for name in os.environ if name.startswith(("NCCL", "GLOO", "VLLM"))}}
started = {{"words": sys.argv[1:], "environment": shown, "pid": os.getpid()}}
(root / host / "started.json").write_text(json.dumps(started))
if os.fork() == 0:  # a worker, which outlives a parent that is killed
    (root / host / "worker.pid").write_text(str(os.getpid()))
    signal.pause()
if (root / host / "fails").exists():
    print("(EngineCore pid=7) ERROR 11-16 15:55:34 [core.py:1510] AssertionError: the reason.", flush=True)
    print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
    os._exit(1)
if "--headless" in sys.argv:
    signal.pause()
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


def install(root: Path, monkeypatch) -> Path:
    """Puts the stand-ins on PATH; hosts are directories of `root`."""
    programs = root / "bin"
    programs.mkdir()
    texts = {"ssh": _SSH, "ip": _IP, "vllm": _VLLM.format(python=sys.executable)}
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STANDIN_ROOT", str(root))
    return root


def make_host(root: Path, name: str, addresses: dict[str, str]) -> Path:
    host = root / name
    host.mkdir()
    lines = [
        f"{number}: {net}    inet {address} brd x scope global"
        for number, (net, address) in enumerate(addresses.items())
    ]
    (host / "addresses").write_text("\n".join(lines) + "\n")
    return host


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def make_spark_sysfs(root: Path, *, active: tuple[str, ...] = ("f1",), mtu: int = 9000) -> Path:
    """Four RoCE devices over two QSFP ports, as a GB10 shows them; those of `active` have a link."""
    sysfs = root / "sys"
    for domain, net_domain in (("p1", "p1"), ("P2p1", "P2p1")):
        for port in ("f0", "f1"):
            device, net = f"roce{domain}s0{port}", f"en{net_domain}s0{port}np{port[1]}"
            place = sysfs / "class" / "infiniband" / device
            is_up = port in active
            write(place / "ports/1/state", "4: ACTIVE" if is_up else "1: DOWN")
            write(place / "ports/1/link_layer", "Ethernet")
            write(place / "ports/1/rate", "200 Gb/sec (4X HDR)")
            for index, (kind, gid) in enumerate(
                [
                    ("IB/RoCE v1", "fe80:0000:0000:0000:4ebb:47ff:fe00:0001"),
                    ("RoCE v2", "fe80:0000:0000:0000:4ebb:47ff:fe00:0001"),
                    ("IB/RoCE v1", "0000:0000:0000:0000:0000:ffff:c0a8:b10b"),
                    ("RoCE v2", "0000:0000:0000:0000:0000:ffff:c0a8:b10b"),
                ]
            ):
                write(place / f"ports/1/gid_attrs/types/{index}", kind)
                write(place / f"ports/1/gids/{index}", gid)
            write(place / f"device/net/{net}/mtu", str(mtu))
            write(sysfs / f"class/net/{net}/mtu", str(mtu))
            write(sysfs / f"class/net/{net}/operstate", "up" if is_up else "down")
            write(sysfs / f"class/net/{net}/phys_port_name", f"p{port[1]}")
    write(sysfs / "class/net/enP7s7/mtu", "1500")
    write(sysfs / "class/net/enP7s7/operstate", "up")
    return sysfs
