"""Log lines: text or JSON, from a level on, of all that a process says."""

import json
import subprocess
import sys

import pytest

from onebox.spec.errors import UsageError
from onebox.spec.log import LogStyle

SCRIPT = """
import logging, sys
from onebox.spec.log import LogStyle
from onebox.spec.output import end_process, log_in_background, say
log_in_background(LogStyle(*sys.argv[1:]))
say("ready")
say("broken", is_error=True)
logging.getLogger("onebox.server").info("served", extra={"fields": {"id": "a"}})
logging.getLogger("onebox.server").debug("details")
logging.getLogger("httpx").info("of another library")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("onebox.server").exception("failed\\nin two lines")
end_process(0)
"""


def spoken(*style):
    done = subprocess.run([sys.executable, "-c", SCRIPT, *style], capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_text_lines_have_a_time_and_a_level():
    out, err = spoken("text", "info")
    assert out == "ready\n"
    assert err.startswith("broken\n")
    date, _, rest = err.splitlines()[1].split(" ", 2)
    assert (len(date), rest) == (10, "INFO onebox.server: served")
    assert "details" not in err
    assert "another" not in err


def test_every_json_line_is_one_object_with_time_and_level():
    out, err = spoken("json", "debug")
    lines = [json.loads(line) for line in (out + err).splitlines()]
    assert [(line["level"], line["message"]) for line in lines] == [
        ("info", "ready"),
        ("error", "broken"),
        ("info", "served"),
        ("debug", "details"),
        ("error", "failed\nin two lines"),
    ]
    assert lines[2]["id"] == "a"
    assert "ZeroDivisionError" in lines[4]["exception"]
    assert all(line["time"].endswith("Z") for line in lines)


def test_below_the_level_nothing_is_written():
    out, err = spoken("json", "error")
    assert out == ""
    assert [json.loads(line)["message"] for line in err.splitlines()] == ["broken", "failed\nin two lines"]


@pytest.mark.parametrize("style", [("xml", "info"), ("text", "loud")])
def test_other_styles_are_refused_with_those_that_exist(style):
    with pytest.raises(UsageError, match=r"--log-(format|level) is .*; it takes"):
        LogStyle(*style)
