"""A flag that several commands take means the same in each: what is planned is what is served."""

import pytest
from typer.main import get_command

from onebox.cli.main import app
from onebox.cli.settings import is_option


def options(command):
    """By flag: (default, help, whether it takes a value)."""
    found = get_command(app)
    for name in command.split():
        found = found.commands[name]
    return {
        flag: (option.default() if callable(option.default) else option.default, option.help, option.is_flag)
        for option in found.params
        if is_option(option)
        for flag in option.opts
    }


@pytest.mark.parametrize("command", ["plan", "warm", "bench decode", "bench mixed", "report", "scaleout plan"])
def test_what_is_planned_or_measured_has_the_defaults_of_serve(command):
    ours, served = options(command), options("serve")
    shared = ours.keys() & served.keys()
    assert shared
    assert {flag: ours[flag] for flag in shared} == {flag: served[flag] for flag in shared}


def test_plan_takes_every_flag_of_serve_that_changes_what_fits_in_memory():
    sizes = {"--kv-cache-dtype", "--mamba-ssm-cache-dtype", "--max-model-len", "--max-num-seqs", "--lm-head"}
    sizes |= {"--max-num-batched-tokens", "--gpu-memory-utilization", "--language-model-only", "--mtp-format"}
    sizes |= {"--draft-vocab", "--hf-overrides"}
    assert sizes <= options("plan").keys() & options("serve").keys()


@pytest.mark.parametrize("command", ["bench run", "bench load", "bench sweep", "bench all"])
def test_a_server_is_named_to_bench_as_to_chat(command):
    ours, chat = options(command), options("chat")
    assert {flag: ours[flag] for flag in ("--url", "--api-key", "--model")} == {
        flag: chat[flag] for flag in ("--url", "--api-key", "--model")
    }
