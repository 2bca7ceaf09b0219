"""RoCE twins and addresses are found in a host's own sysfs, by the script that a launch runs there."""

import subprocess

import pytest

from onebox.scaleout.environment import fabric_notes, rank_settings
from onebox.scaleout.hosts import PROBE, choose_fabrics, read_probe
from onebox.spec.errors import MismatchError, UnreadableError
from tests.scaleout.standins import install, make_host, make_spark_sysfs

CABLE = {
    "lo": "127.0.0.1/8",
    "docker0": "172.17.0.1/16",
    "enP7s7": "10.0.0.{n}/24",
    "enp1s0f1np1": "192.168.177.{n}/24",
}


@pytest.fixture
def root(tmp_path, monkeypatch):
    return install(tmp_path, monkeypatch)


def probed(root, name, addresses, monkeypatch, **sysfs):
    host = make_host(root, name, addresses)
    place = make_spark_sysfs(host, **sysfs) if sysfs is not None else host
    monkeypatch.setenv("STANDIN_HOST", name)
    done = subprocess.run(
        ["/bin/sh", "-c", PROBE, "onebox", "/nowhere", str(place)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return read_probe(name, done.stdout)


def sparks(root, monkeypatch, cable=CABLE, **sysfs):
    addresses = [{net: text.format(n=number) for net, text in cable.items()} for number in (11, 12)]
    return [probed(root, f"spark-{n}", own, monkeypatch, **sysfs) for n, own in enumerate(addresses, 1)]


def settings(fabric, num_hosts=2):
    return {one.name: one.value for one in rank_settings(fabric, num_hosts=num_hosts)}


def test_both_twins_of_the_cable_are_named_and_no_other_device(root, monkeypatch):
    head, worker = choose_fabrics(sparks(root, monkeypatch))
    found = settings(head)
    assert found["NCCL_IB_HCA"] == "rocep1s0f1,roceP2p1s0f1"
    assert found["NCCL_SOCKET_IFNAME"] == found["GLOO_SOCKET_IFNAME"] == "enp1s0f1np1"
    assert found["VLLM_HOST_IP"] == "192.168.177.11"
    assert found["NCCL_IB_GID_INDEX"] == "3"
    assert settings(worker)["VLLM_HOST_IP"] == "192.168.177.12"
    assert list(fabric_notes(head)) == []


def test_the_other_port_is_found_as_well(root, monkeypatch):
    cable = {"enp1s0f0np0": "192.168.9.{n}/24"}
    head, _ = choose_fabrics(sparks(root, monkeypatch, cable, active=("f0",)))
    assert settings(head)["NCCL_IB_HCA"] == "rocep1s0f0,roceP2p1s0f0"


def test_two_cables_are_four_devices(root, monkeypatch):
    head, _ = choose_fabrics(sparks(root, monkeypatch, active=("f0", "f1")))
    assert len(settings(head)["NCCL_IB_HCA"].split(",")) == 4


def test_without_a_shared_address_on_the_cable_tcp_is_used_and_said(root, monkeypatch):
    cable = {"docker0": "172.17.0.1/16", "enP7s7": "10.0.0.{n}/24"}
    head, _ = choose_fabrics(sparks(root, monkeypatch, cable))
    assert head.interface == "enP7s7"  # and not the bridge, which has one address on both hosts
    assert settings(head)["NCCL_IB_DISABLE"] == "1"
    assert "without an address that the other hosts share" in next(iter(fabric_notes(head)))


def test_a_small_mtu_and_a_missing_twin_are_said(root, monkeypatch):
    head, _ = choose_fabrics(sparks(root, monkeypatch, mtu=1500))
    assert "mtu 9000" in " ".join(fabric_notes(head))
    alone = head.roce[:1]
    lame = type(head)(head.host, head.interface, head.address, alone)
    assert "half the bandwidth" in " ".join(fabric_notes(lame))


def test_hosts_without_a_common_network_are_refused(root, monkeypatch):
    reports = [
        probed(root, "a", {"eth0": "10.1.0.1/24"}, monkeypatch),
        probed(root, "b", {"eth0": "10.2.0.1/24"}, monkeypatch),
    ]
    with pytest.raises(MismatchError, match=r"a: 10.1.0.1/24; b: 10.2.0.1/24"):
        choose_fabrics(reports)


def test_a_host_that_prints_something_else_is_refused():
    with pytest.raises(UnreadableError, match="This account is locked"):
        read_probe("a", "This account is locked\n")


def test_every_variable_has_a_reason(root, monkeypatch):
    head, _ = choose_fabrics(sparks(root, monkeypatch))
    assert all(len(one.reason) > 10 for one in rank_settings(head, num_hosts=3))
    assert rank_settings(head, num_hosts=1) == []
