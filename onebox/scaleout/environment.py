"""The environment of a rank: each variable with its value and the reason for it."""

from collections.abc import Iterator
from typing import NamedTuple

from onebox.scaleout.hosts import Fabric

__all__ = ["NodeVariable", "fabric_notes", "rank_settings"]

_LARGE_MTU = 9000


class NodeVariable(NamedTuple):
    name: str
    value: str
    reason: str


def rank_settings(fabric: Fabric, *, num_hosts: int) -> list[NodeVariable]:
    """What a rank on `fabric.host` needs; nothing where there is one host."""
    if num_hosts == 1:
        return []
    return [*_addresses(fabric), *(_roce(fabric) if fabric.roce else _tcp()), *_runtime(fabric, num_hosts)]


def _addresses(fabric: Fabric) -> Iterator[NodeVariable]:
    yield NodeVariable("VLLM_HOST_IP", fabric.address, "vLLM else takes the address of the default route")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        yield NodeVariable(name, fabric.interface, "the interface with that address, which all ranks reach")


def _roce(fabric: Fabric) -> Iterator[NodeVariable]:
    names = ",".join(device.name for device in fabric.roce)
    yield NodeVariable("NCCL_IB_HCA", names, "both twins of a cable, each one PCIe link of about 100 Gbit/s")
    yield NodeVariable("UCX_NET_DEVICES", ",".join(f"{device.name}:1" for device in fabric.roce), "the same for UCX")
    yield NodeVariable("NCCL_NET", "IB", "RDMA, or a clear failure: never TCP by accident")
    yield NodeVariable("NCCL_IB_DISABLE", "0", "images for single boxes switch it off")
    indices = {device.gid_index for device in fabric.roce}
    if len(indices) == 1 and None not in indices:
        yield NodeVariable("NCCL_IB_GID_INDEX", str(indices.pop()), "RoCE version 2 over IPv4, as the ports list it")
    yield NodeVariable("NCCL_CROSS_NIC", "1", "a ring may leave by one twin and come back by the other")
    yield NodeVariable("NCCL_IGNORE_CPU_AFFINITY", "1", "a GB10's cores are all as near to the links")


def _tcp() -> Iterator[NodeVariable]:
    yield NodeVariable("NCCL_IB_DISABLE", "1", "no RoCE device is active under this address: TCP")


def _runtime(fabric: Fabric, num_hosts: int) -> Iterator[NodeVariable]:
    if not fabric.host.has_gpu:
        return
    yield NodeVariable("NCCL_CUMEM_ENABLE", "0", "its allocator takes memory that a GB10 shares with the system")
    yield NodeVariable("OMP_NUM_THREADS", "4", "more threads for loading than one, fewer than slow the GPU's host down")
    if num_hosts > 2 and fabric.roce:
        yield NodeVariable("NCCL_IB_SUBNET_AWARE_ROUTING", "1", "a ring of three boxes has a subnet for each cable")
        yield NodeVariable("NCCL_IB_MERGE_NICS", "0", "the twins of a ring lead to different boxes")
        yield NodeVariable("NCCL_NET_PLUGIN", "none", "a plugin would merge them again")


def fabric_notes(fabric: Fabric) -> Iterator[str]:
    """Sentences on a network that works, and is slower than it could be."""
    host = fabric.host
    if not fabric.roce:
        if host.roce:
            names = ", ".join(device.interface for device in host.roce)
            yield f"{host.name}: RoCE is active on {names}, without an address that the other hosts share: TCP is used."
        elif host.has_gpu:
            yield f"{host.name}: no RoCE device is active; every all-reduce goes over TCP on {fabric.interface}."
        return
    ports = [device.port for device in fabric.roce]
    for port in dict.fromkeys(ports):
        if ports.count(port) == 1:
            yield f"{host.name}: one RoCE device is active on port {port}: its twin is down, half the bandwidth."
    small = [device.interface for device in fabric.roce if host.mtus.get(device.interface, _LARGE_MTU) < _LARGE_MTU]
    if small:
        yield f"{host.name}: {', '.join(small)} has an MTU below {_LARGE_MTU}; set it: ip link set dev NAME mtu 9000."
