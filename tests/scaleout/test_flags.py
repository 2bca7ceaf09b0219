"""Options of `onebox serve` become vLLM's, and none of them is dropped without a word."""

import json

import pytest
import typer
from typer.main import get_command

from onebox.cli.serve import serve
from onebox.scaleout.flags import NO_COUNTERPART, SAME, TRANSLATED, map_flags, refuse_open_server
from onebox.spec.errors import UsageError


def serve_flags():
    app = typer.Typer(add_completion=False)
    app.command()(serve)
    options = [option for option in get_command(app).params if option.param_type_name == "option"]
    return {name.removeprefix("--") for option in options for name in (*option.opts, *option.secondary_opts)}


def test_every_option_of_onebox_serve_is_passed_translated_or_explained():
    known = [SAME, TRANSLATED, set(NO_COUNTERPART)]
    assert serve_flags() == set().union(*known)
    assert sum(map(len, known)) == len(serve_flags())  # each in one table


def test_flags_of_the_same_name_are_passed_and_others_are_vllms_own():
    flags = map_flags(["--max-model-len", "32K", "--enforce-eager", "--no-enable-prefix-caching", "--load_format=auto"])
    assert flags.shared[:6] == [
        "--max-model-len",
        "32K",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--load-format",
        "auto",
    ]


def test_the_port_is_the_heads_and_a_number():
    flags = map_flags(["--port", "9000", "--max-num-seqs", "4"])
    assert (flags.port, flags.shared[:2]) == (9000, ["--max-num-seqs", "4"])
    assert "--port" not in flags.head
    for wrong in ("x", "0", "65536", "-1"):
        with pytest.raises(UsageError, match="--port is"):
            map_flags(["--port", wrong])


def test_what_has_no_counterpart_is_said():
    flags = map_flags(["--prefix-dir", "/var/prefixes", "--max-num-waiting", "9"])
    assert [note.split()[0] for note in flags.notices[:2]] == ["--prefix-dir", "--max-num-waiting"]
    assert "/var/prefixes" not in flags.shared


@pytest.mark.parametrize(
    ("ours", "theirs"), [("turboquant", "turboquant_4bit_nc"), ("bf16", "bfloat16"), ("fp8_e4m3", "fp8_e4m3")]
)
def test_kv_formats_have_vllms_names(ours, theirs):
    assert map_flags(["--kv-cache-dtype", ours]).shared[:2] == ["--kv-cache-dtype", theirs]


def test_a_kv_format_that_vllm_does_not_have_is_refused():
    with pytest.raises(UsageError, match="turboquant_k2v2 has no counterpart"):
        map_flags(["--kv-cache-dtype", "turboquant_k2v2"])


@pytest.mark.parametrize(
    ("given", "method"), [({"method": "auto"}, "mtp"), ({"method": "dflash", "model": "/d"}, "dflash")]
)
def test_drafts_are_vllms(given, method):
    flags = map_flags(["--speculative-config", json.dumps(given)])
    assert flags.drafter == method
    assert json.loads(flags.shared[1])["method"] == method


def test_no_drafts_are_no_flag():
    assert "--speculative-config" not in map_flags(["--speculative-config", '{"method": "none"}']).shared


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "-tp", "--nnodes", "--headless", "--master-addr"])
def test_what_the_launch_sets_is_refused(flag):
    with pytest.raises(UsageError, match="is set by"):
        map_flags([flag, "2"])


def test_tool_calls_and_reasoning_are_parsed_as_onebox_parses_them():
    assert "qwen3_coder" in map_flags([]).shared
    assert "qwen3_coder" not in map_flags(["--tool-call-parser", "hermes"]).shared


def test_an_open_server_is_refused_as_by_onebox_serve():
    with pytest.raises(UsageError, match="no API key"):
        refuse_open_server("10.0.0.1", map_flags([]))
    refuse_open_server("10.0.0.1", map_flags(["--api-key", "secret"]))
    refuse_open_server("10.0.0.1", map_flags(["--allow-open-server"]))
    refuse_open_server("127.0.0.1", map_flags([]))
