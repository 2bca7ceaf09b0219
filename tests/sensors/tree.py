"""A tree of sensors as Linux shows them, and nvidia-smi's answers as recorded."""

SPARK = {
    "hwmon/hwmon0/name": "acpitz",
    "hwmon/hwmon0/temp1_input": "38900",
    "hwmon/hwmon1/name": "spbm",
    "hwmon/hwmon1/power1_label": "sys_total",
    "hwmon/hwmon1/power1_input": "25400000",
    "hwmon/hwmon1/power2_label": "soc_pkg",
    "hwmon/hwmon1/power2_input": "17100000",
    "hwmon/hwmon1/power3_label": "budget_gpu",
    "hwmon/hwmon1/power3_input": "170000000",
    "hwmon/hwmon1/power4_label": "syspl1",
    "hwmon/hwmon1/power4_input": "26000000",
    "hwmon/hwmon1/temp1_label": "tj_max",
    "hwmon/hwmon1/temp1_input": "61000",
    "hwmon/hwmon1/temp2_label": "tj_max_c",
    "hwmon/hwmon1/temp2_input": "0",
    "hwmon/hwmon1/prochot": "0",
    "thermal/thermal_zone0/type": "acpitz",
    "thermal/thermal_zone0/temp": "41700",
    "thermal/thermal_zone1/type": "broken",
    "thermal/thermal_zone1/temp": "-273150",
}
"""A DGX Spark with the spbm driver."""

DESKTOP = {
    "hwmon/hwmon0/name": "power_meter",
    "hwmon/hwmon0/power1_average": "143000000",
    "powercap/intel-rapl:0/name": "package-0",
    "powercap/intel-rapl:0/energy_uj": "5000000",
    "powercap/intel-rapl:0/max_energy_range_uj": "262143328850",
    "powercap/intel-rapl:0:0/name": "core",
    "powercap/intel-rapl:0:0/energy_uj": "4000000",
}
"""A board with ACPI's power meter, and RAPL."""

H200 = "0, 76.50, 31, 33, 345, 3201, 0x0000000000000001\n"
GB10 = "0, 4.51, 38, [N/A], 208, [N/A], 0x0000000000000001\n"
BUSY = "0, 698.10, 71, 84, 1680, 3201, 0x0000000000000024\n1, 640.00, 65, 80, 1755, 3201, 0x0000000000000000\n"
MUTE = "0, [N/A], [N/A], [N/A], [N/A], [N/A], [Not Supported]\n"


def plant(root, files):
    """Writes the files below root/sys/class."""
    for name, text in files.items():
        path = root / "sys/class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root
