"""Sensors tell what the system tells: a fake tree of sysfs, and recorded answers of nvidia-smi."""

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from onebox.sensors import Sensors, reading
from onebox.sensors.nvidia import GpuReading, parse_gpus, read_gpus
from tests.sensors.tree import BUSY, DESKTOP, GB10, H200, MUTE, SPARK, plant


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Makes a program nvidia-smi that prints this; an old one knows only the older name of the reasons."""

    def made(text, *, is_old=False):
        script = tmp_path / "bin" / "nvidia-smi"
        script.parent.mkdir(exist_ok=True)
        script.write_text(
            f"#!{sys.executable}\nimport sys\n"
            f"if {is_old} and 'clocks_event_reasons' in sys.argv[1]:\n"
            "    sys.exit('Field \"clocks_event_reasons.active\" is not a valid field to query.')\n"
            f"sys.stdout.write({text!r})\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(script.parent))

    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    return made


def test_a_recorded_answer_of_nvidia_smi_is_read_and_what_is_not_told_is_none():
    assert parse_gpus(H200) == [GpuReading(0, 76.5, 31, 33, 345, 3201, ())]
    assert parse_gpus(GB10) == [GpuReading(0, 4.51, 38, None, 208, None, ())]
    assert parse_gpus(MUTE) == [GpuReading(0, None, None, None, None, None, None)]
    first, second = parse_gpus(BUSY)
    assert first.throttled == ("software power cap", "software thermal slowdown")
    assert second.throttled == ()
    assert parse_gpus("No devices were found\n") == []


def test_an_older_driver_is_asked_by_the_older_name(smi):
    assert read_gpus() == []
    smi(H200, is_old=True)
    assert read_gpus()[0].power_w == 76.5


def test_a_spark_tells_its_whole_power_and_limits_are_not_power(tmp_path, smi):
    smi(GB10)
    found = Sensors(plant(tmp_path, SPARK)).read()
    assert found.box_w == 25.4
    assert found.gpu_w == 4.51
    assert found.power_w == {"box": 25.4, "spbm sys_total": 25.4, "spbm soc_pkg": 17.1, "GPU 0": 4.51}
    assert found.temperature_c == {"GPU 0": 38, "acpitz temp1": 38.9, "spbm tj_max": 61.0, "acpitz 0": 41.7}
    assert found.clock_mhz["GPU 0 SM"] == 208
    assert found.throttled == {"GPU 0: any": False, "box: PROCHOT": False}
    (tmp_path / "sys/class/hwmon/hwmon1/prochot").write_text("1\n")
    assert Sensors(tmp_path).read().throttled["box: PROCHOT"] is True


def test_an_energy_counter_is_power_from_its_second_reading_on_and_may_start_again(tmp_path, smi, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(reading, "time", SimpleNamespace(perf_counter=lambda: now_s))
    root = plant(tmp_path, DESKTOP)
    counter, sensors = root / "sys/class/powercap/intel-rapl:0/energy_uj", Sensors(root)
    first = sensors.read()
    # The meter tells at once; the counter has no power yet, and the core is a part of the package.
    assert first.power_w == {"box": 143.0, "power_meter power1": 143.0}
    now_s += 0.5
    counter.write_text("8000000\n")
    assert sensors.read().power_w["CPU package-0"] == pytest.approx(3.0 / 0.5)
    now_s += 2.0
    counter.write_text("1000000\n")
    assert sensors.read().power_w["CPU package-0"] > 0


def test_a_throttled_gpu_says_why(tmp_path, smi):
    smi(BUSY)
    found = Sensors(tmp_path).read()
    assert found.gpu_w == pytest.approx(1338.1)
    assert found.throttled == {
        "GPU 0: any": True,
        "GPU 0: software power cap": True,
        "GPU 0: software thermal slowdown": True,
        "GPU 1: any": False,
    }
    assert found.box_w is None


@pytest.mark.parametrize("text", ["", MUTE, "garbage\n"])
def test_a_machine_that_tells_nothing_has_no_zeros(tmp_path, smi, text):
    smi(text)
    found = Sensors(tmp_path).read()
    assert (found.power_w, found.temperature_c, found.clock_mhz, found.throttled) == ({}, {}, {}, {})
    assert (found.gpu_w, found.box_w) == (None, None)


def test_a_process_that_can_open_nothing_has_no_sensors_and_no_error(tmp_path, smi, monkeypatch):
    """Such as a server that is out of descriptors, whose metrics are asked for."""
    root = plant(tmp_path, SPARK)
    assert Sensors(root).read().box_w is not None

    def refuse(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        patch.setattr(Path, "read_text", refuse)
        found = Sensors(root).read()
    assert (found.power_w, found.temperature_c, found.clock_mhz, found.throttled) == ({}, {}, {}, {})


def test_one_gpu_that_does_not_tell_its_power_leaves_no_sum_of_the_others(tmp_path, smi):
    smi(H200 + MUTE.replace("0,", "1,", 1))
    assert Sensors(tmp_path).read().gpu_w is None
