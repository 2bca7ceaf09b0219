"""What is told to the operator never stops or ends the process that speaks."""

import subprocess
import sys

import pytest

SCRIPT = """
import logging, os, sys, threading
from onebox.spec.output import end_process, log_in_background, say
log_in_background()
sys.stdin.read(1)
for number in range(20_000):
    say("a line that is long enough to fill a pipe soon")
    logging.getLogger("a").error("number %d", number)
with open(sys.argv[1], "w") as file:
    file.write("spoken")
end_process(7)
"""


@pytest.mark.parametrize("closes", [True, False], ids=["nobody listens", "nobody reads"])
def test_speaking_goes_on_where_nobody_listens(tmp_path, closes):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "done")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        if closes:
            process.stdout.close()
            process.stderr.close()
        process.stdin.write(b"go")
        process.stdin.close()
        assert process.wait(60) == 7
    assert (tmp_path / "done").read_text() == "spoken"


def test_all_that_was_said_is_written_before_the_end():
    script = (
        "from onebox.spec.output import *\nfor i in range(500): say(str(i))\nsay('no', is_error=True); end_process(3)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (3, "no\n")
    assert done.stdout.split() == [str(number) for number in range(500)]


def test_without_standard_streams_nothing_is_said():
    script = "import sys; sys.stdout = sys.stderr = None\nfrom onebox.spec.output import *\nsay('a'); end_process(0)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"")
