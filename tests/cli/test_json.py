"""`--json`: stdout is one JSON document, of every command that has the flag."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from onebox.bench.record import write_run
from onebox.cli.json_output import JSON_NAME, echo_json, json_alone
from onebox.cli.main import app
from onebox.fleet.step_times import write_step_times
from tests.bench.faulty import faulty
from tests.bench.test_compare import run
from tests.fleet.test_simulation import TIMES

QUICK = ("--idle", "0", "--warm-ups", "0", "--seed", "7")
ELSEWHERE = {
    "bench ladder": "tests/bench/test_ladder.py",
    "scaleout check": "tests/scaleout/test_check.py",
    "scaleout compare": "tests/scaleout/test_compare.py",
}
"""Where the others are run: they need more than can be made here in a moment."""
ON_A_GPU = {"bench decode"}


def commands(command, path=()):
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))
    if any(parameter.name == JSON_NAME for parameter in command.params):
        yield " ".join(path)


def strict(text):
    """Parsed as a program would: one document, with nothing that JSON does not have."""

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def records(tmp_path):
    for name in ("a.json", "b.json"):
        write_run(run(), tmp_path / name)
    return tmp_path / "a.json", tmp_path / "b.json"


@pytest.fixture
def steps(tmp_path):
    write_step_times(TIMES, tmp_path / "steps.json")
    return tmp_path / "steps.json"


@pytest.fixture
def fleet(tmp_path):
    """The file of a fleet that answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"members": []}')

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        path = tmp_path / "fleet.toml"
        path.write_text(f'[fleet]\nadmin_port = {server.server_port}\n[[member]]\nname = "a"\nurl = "http://x:1"\n')
        yield path
        server.shutdown()
        thread.join()


@pytest.fixture
def arguments(tmp_path, checkpoints, records, steps, fleet):
    (tmp_path / "prefixes").mkdir()
    prefixes = ("--dir", tmp_path / "prefixes")
    spark = ("qwen3.5-122b-a10b", "--box", "dgx-spark")
    return {
        "inspect": (checkpoints / "autoround",),
        "plan": spark,
        "list": (),
        "ps": (),
        "cache ls": prefixes,
        "cache stat": prefixes,
        "cache verify": prefixes,
        "cache rm": ("--all", *prefixes),
        "bench compare": records,
        "fleet status": ("--config", fleet),
        "fleet simulate": ("--steps", steps, "--seconds", "5", "--boxes", "1"),
        "scaleout plan": (*spark, "--boxes", "2"),
    }


ON_A_SERVER = {
    "bench run": ("--workloads", "math", "--runs", "1", *QUICK),
    "bench load": ("--mixes", "uniform_short", "--count", "2", *QUICK),
    "bench sweep": ("--pp", "64", "--tg", "8", "--runs", "1", *QUICK),
    "bench all": ("--runs", "1", "--rate", "200", "--max-context", "300", *QUICK),
    "eval": ("--checks", "facts"),
}


def test_every_command_with_the_flag_prints_one_document_and_nothing_else(run_cli, arguments, tmp_path):
    known = {*arguments, *ON_A_SERVER, *ELSEWHERE, *ON_A_GPU}
    assert set(commands(get_command(app))) == known
    for name, given in arguments.items():
        result = run_cli(*name.split(), *given, "--json")
        assert result.code in (0, 4), (name, result.err)
        assert strict(result.out) is not None, name
    with faulty() as server:
        for name, given in ON_A_SERVER.items():
            url = (server.url,) if name == "eval" else ("--url", server.url)
            output = tmp_path / f"{name}.json"
            result = run_cli(*name.split(), *url, *given, "--output", output, "--json")
            assert strict(result.out), (name, result.err)
            assert str(output) in result.err


@pytest.mark.parametrize(("name", "path"), ELSEWHERE.items())
def test_the_others_are_run_with_the_flag_by_their_own_tests(name, path):
    text = Path(path).read_text()
    assert '"--json"' in text
    assert all(f'"{word}"' in text for word in name.split())


def test_what_is_printed_beside_the_document_goes_to_stderr_and_what_json_lacks_is_null(capsys):
    with json_alone():
        typer.echo("a row")
        print("another")  # noqa: T201
        echo_json({"rows": [1.5, float("nan"), (float("inf"),)], "name": "ü\udc80"})
    typer.echo("afterwards")
    found = capsys.readouterr()
    document, after = found.out.splitlines()
    assert (strict(document), after) == ({"rows": [1.5, None, [None]], "name": "ü\udc80"}, "afterwards")
    assert found.err.splitlines() == ["a row", "another"]
