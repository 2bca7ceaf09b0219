"""What a host is asked before a launch: its RoCE devices, its addresses, whether it has the model.

A Spark's QSFP port is fed by two PCIe links, so one cable shows as two RoCE devices of about 100 Gbit/s each, its
*twins* (rocep1s0f1 and roceP2p1s0f1), with an Ethernet interface each. An address on one of the two is enough, but NCCL
must be told both names. They are found in sysfs: devices whose port is active, by the name of their port.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from onebox.spec.errors import MismatchError, UnreadableError

__all__ = ["PROBE", "Fabric", "HostReport", "RoceDevice", "choose_fabrics", "read_probe"]

# POSIX sh: $1 is the model's directory, $2 the root of sysfs. One fact a line, its words separated by bars.
PROBE = r"""
sys=${2:-/sys}
word() { value=; { read -r value < "$1"; } 2>/dev/null; value=${value:--}; }
for device in "$sys"/class/infiniband/*; do
  [ -d "$device" ] || continue
  port=$device/ports/1
  for net in "$device"/device/net/*; do net=${net##*/}; done
  gid=-
  for index in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
    word "$port/gid_attrs/types/$index"; kind=$value
    word "$port/gids/$index"
    case $kind/$value in "RoCE v2/0000:0000:0000:0000:0000:ffff:"*) gid=$index; break;; esac
  done
  word "$port/state"; state=$value
  word "$port/link_layer"; layer=$value
  word "$port/rate"
  echo "roce|${device##*/}|$net|$state|$layer|$value|$gid"
done
for net in "$sys"/class/net/*; do
  [ -d "$net" ] || continue
  word "$net/mtu"; mtu=$value
  word "$net/phys_port_name"
  echo "net|${net##*/}|$mtu|$value"
done
ip -o -4 addr show 2>/dev/null | while read -r _ name _ address _; do echo "address|$name|$address"; done
[ -e /dev/nvidiactl ] && echo "gpu|nvidia"
if [ -f "$1/config.json" ]; then echo "model|$(sha256sum < "$1/config.json" | cut -c1-16)"; else echo "model|-"; fi
echo "end|probe"
"""


@dataclass(frozen=True)
class RoceDevice:
    """One RDMA device over Ethernet, its interface and the QSFP port that both belong to."""

    name: str
    interface: str
    port: str
    rate: str
    gid_index: int | None
    """Of RoCE version 2 over IPv4; None: the port has no such address."""


@dataclass(frozen=True)
class HostReport:
    """What `PROBE` found on a host."""

    name: str
    roce: tuple[RoceDevice, ...] = ()
    """Active ones."""
    num_inactive: int = 0
    addresses: tuple[tuple[str, ipaddress.IPv4Interface], ...] = ()
    mtus: dict[str, int] = field(default_factory=dict)
    has_gpu: bool = False
    model_digest: str | None = None
    """Of config.json; None: the host has no such directory."""


@dataclass(frozen=True)
class Fabric:
    """The network that a rank uses: its interface and address, and the RoCE devices under it."""

    host: HostReport
    interface: str
    address: str
    roce: tuple[RoceDevice, ...] = ()


def read_probe(name: str, text: str) -> HostReport:
    """The report of the host `name` from what `PROBE` printed there."""
    facts = [line.split("|") for line in text.splitlines()]
    if ["end", "probe"] not in facts:
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "nothing")
        raise UnreadableError(f"{name} did not answer the questions before a launch; it printed: {last}")
    ports = {fact[1]: fact[3] for fact in facts if fact[0] == "net"}
    devices = [fact for fact in facts if fact[0] == "roce" and fact[4] == "Ethernet"]
    active = [fact for fact in devices if fact[3].endswith(": ACTIVE")]
    roce = tuple(
        RoceDevice(device, net, _port(device, ports.get(net, "-")), rate, None if gid == "-" else int(gid))
        for _, device, net, _, _, rate, gid in active
    )
    addresses = [(fact[1], ipaddress.IPv4Interface(fact[2])) for fact in facts if fact[0] == "address"]
    return HostReport(
        name=name,
        roce=tuple(sorted(roce, key=lambda device: (device.port, device.name.lower()))),
        num_inactive=len(devices) - len(active),
        addresses=tuple((net, address) for net, address in addresses if not address.ip.is_loopback),
        mtus={fact[1]: int(fact[2]) for fact in facts if fact[0] == "net" and fact[2].isdigit()},
        has_gpu=["gpu", "nvidia"] in facts,
        model_digest=next((fact[1] for fact in facts if fact[0] == "model" and fact[1] != "-"), None),
    )


def _port(device: str, phys_port_name: str) -> str:
    """The QSFP port: as the driver names it, else the PCI function in the device's name (rocep1s0f1: f1)."""
    if phys_port_name != "-":
        return phys_port_name
    found = re.search(r"f(\d+)$", device)
    return f"p{found.group(1)}" if found else device


def choose_fabrics(hosts: Sequence[HostReport]) -> list[Fabric]:
    """For each host an address in a network that all share: that of active RoCE devices before any other.

    An address that two hosts have, such as that of a bridge for containers, leads from none to the other.
    """
    for with_roce in (True, False):
        candidates = [_candidates(host, with_roce=with_roce) for host in hosts]
        for _, address in candidates[0]:
            chosen = [_in_network(found, address.network) for found in candidates]
            fabrics = [_fabric(host, one) for host, one in zip(hosts, chosen, strict=True) if one]
            if len({fabric.address for fabric in fabrics}) == len(hosts):
                return fabrics
    shown = "; ".join(f"{host.name}: {', '.join(str(one) for _, one in host.addresses) or 'none'}" for host in hosts)
    raise MismatchError(f"The hosts have no network in common ({shown}): give each an address in one subnet.")


def _candidates(host: HostReport, *, with_roce: bool) -> list[tuple[str, ipaddress.IPv4Interface]]:
    """Addresses under active RoCE devices, or the others; first the one that the host was called by."""
    under = {device.interface for device in host.roce}
    found = [(name, address) for name, address in host.addresses if (name in under) == with_roce]
    return sorted(found, key=lambda one: str(one[1].ip) != host.name)


def _in_network(
    found: Sequence[tuple[str, ipaddress.IPv4Interface]], network: ipaddress.IPv4Network
) -> tuple[str, ipaddress.IPv4Interface] | None:
    return next(((name, address) for name, address in found if address.network == network), None)


def _fabric(host: HostReport, chosen: tuple[str, ipaddress.IPv4Interface]) -> Fabric:
    """All active devices of the ports whose interfaces are in use; with two cables, all four."""
    name, address = chosen
    return Fabric(host, name, str(address.ip), host.roce if any(one.interface == name for one in host.roce) else ())
