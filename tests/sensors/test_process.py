"""CPU time of real processes, and who listens on a port."""

import os
import socket
import subprocess
import sys
import time

from onebox.sensors import cpu_seconds, listening_process


def test_cpu_time_holds_that_of_children_that_live_and_that_have_ended():
    burn = "import time; end = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    parent = (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {burn!r}])\n"
        f"child = subprocess.Popen([sys.executable, '-c', {burn + 'print(1, flush=True); time.sleep(60)'!r}],"
        " stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print('both', flush=True)\n"
        "sys.stdin.readline(); child.kill(); child.wait()\n"
    )
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "both\n"
        assert cpu_seconds(process.pid) >= 0.59
        process.stdin.close()
    assert cpu_seconds(process.pid) is None


def test_the_process_that_listens_is_found_by_its_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert listening_process(port) == os.getpid()
    # The port is free at once, or some moments later.
    end = time.monotonic() + 20
    while listening_process(port) == os.getpid() and time.monotonic() < end:
        time.sleep(0.05)
    assert listening_process(port) != os.getpid()
