"""Options from the environment and from a file: the order in which they count, and what is refused."""

import json
import os

import pytest
from typer.main import get_command

from onebox.cli.main import app
from onebox.cli.settings import is_option, read_settings, unknown_variables, variable_name

PLAN = ("plan", "qwen3.5-122b-a10b", "--json")


@pytest.fixture
def planned(run_cli):
    """The limits that `onebox plan` counts with."""

    def run(*words):
        result = run_cli(*PLAN, *words)
        assert result.code == 0, result.err
        return json.loads(result.out)["memory"]

    return run


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "onebox.toml"
        path.write_text(text)
        return path

    return write


def test_the_command_line_counts_more_than_the_environment_and_that_more_than_the_file(planned, config, monkeypatch):
    path = config("max-num-seqs = 3\nmax_model_len = '32K'\n")
    assert (planned("--config", path)["max_num_seqs"], planned("--config", path)["max_model_len_tokens"]) == (3, 32768)
    monkeypatch.setenv("ONEBOX_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("ONEBOX_MAX_MODEL_LEN", "16k")
    found = planned("--config", path)
    assert (found["max_num_seqs"], found["max_model_len_tokens"]) == (2, 16_000)
    assert planned("--config", path, "--max-num-seqs", "1")["max_num_seqs"] == 1
    assert planned("--max-model-len", "8K")["max_model_len_tokens"] == 8192


def test_a_file_may_be_named_by_the_environment(planned, config, monkeypatch):
    monkeypatch.setenv("ONEBOX_CONFIG", str(config("max-num-seqs = 5")))
    assert planned()["max_num_seqs"] == 5


def test_the_fleets_file_has_a_variable_of_its_own(run_cli, config, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONEBOX_CONFIG", str(config("max-num-seqs = 5")))
    assert "fleet.toml" in run_cli("fleet", "up", "--check").err
    (tmp_path / "ours.toml").write_text("[fleet]\nrouter = 'none'\n")
    monkeypatch.setenv("ONEBOX_FLEET_CONFIG", "ours.toml")
    assert "ours.toml" in run_cli("fleet", "up", "--check").err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max-modle-len = 3", "max-modle-len is no option of onebox serve; did you mean max-model-len?\n"),
        ("nonsense = 3", "nonsense is no option of onebox serve; --help lists them.\n"),
        ("tensor-parallel-size = 2", "onebox runs on one GPU"),
        ("language-model-only = 'yes'", "language-model-only takes true or false"),
        ("max-num-seqs = true", "max-num-seqs takes a text or a number"),
        ("max-num-seqs = 'many'", "max-num-seqs: "),
        ("max-num-seqs = ", "is not TOML"),
        ("config = 'other.toml'", "config is no option"),
    ],
)
def test_a_wrong_file_is_told_by_its_name_and_key(run_cli, config, text, told):
    path = config(text)
    result = run_cli(*PLAN, "--config", path)
    assert result.code == 2
    assert str(path) in result.err.replace("\n", "")
    assert told in result.err
    assert "Traceback" not in result.err


def test_a_file_that_is_absent_is_a_sentence(run_cli, tmp_path):
    result = run_cli(*PLAN, "--config", tmp_path / "none.toml")
    assert result.code == 2
    assert "cannot be read: No such file" in result.err


def test_a_file_for_serve_may_be_given_to_plan(planned, config):
    assert planned("--config", config("port = 9000\nmax-num-seqs = 4"))["max_num_seqs"] == 4


def serve_parameters():
    return get_command(app).commands["serve"].params


def test_a_table_is_the_json_of_an_option_and_a_list_its_values(config):
    path = config("api-key = ['a', 'b']\nallowed-hosts = ['box.lan']\nmodel = 'DIR'\n[hf-overrides]\nx = 1\n")
    found = read_settings(serve_parameters(), ["--config", str(path)], {}).values
    assert found == {
        "api_key": ["a", "b"],
        "allowed_hosts": '["box.lan"]',
        "model": "DIR",
        "hf_overrides": '{"x": 1}',
    }


def test_the_last_config_on_the_line_is_read_and_none_after_two_dashes(config):
    path = config("port = 1")
    for words, port in ((["--config", "x", f"--config={path}"], 1), (["--", "--config", str(path)], None)):
        assert read_settings(serve_parameters(), words, {}).values.get("port") == port


def test_every_option_of_every_command_has_a_variable_of_its_own():
    commands = [get_command(app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        names = [variable_name(option) for option in command.params if is_option(option)]
        assert len(names) == len(set(names)), command.name
        for option, name in zip(filter(is_option, command.params), names, strict=True):
            if option.name in ("config", "help"):
                continue
            text = "true" if option.is_flag else "7"
            assert option.name in read_settings(command.params, (), {name: text}).values, f"{command.name}: {name}"


def test_switches_take_the_usual_words(run_cli, monkeypatch):
    sizes = []
    for text in ("on", "0"):
        monkeypatch.setenv("ONEBOX_LANGUAGE_MODEL_ONLY", text)
        parts = json.loads(run_cli(*PLAN).out)["memory"]["parts"]
        sizes.append(next(part["bytes"] for part in parts if part["name"] == "weights"))
    assert sizes[0] < sizes[1], "the vision tower is among the weights"
    monkeypatch.setenv("ONEBOX_LANGUAGE_MODEL_ONLY", "perhaps")
    assert "ONEBOX_LANGUAGE_MODEL_ONLY is perhaps; it takes true or false." in run_cli(*PLAN).err


def test_a_wrong_value_names_its_variable(run_cli, monkeypatch):
    monkeypatch.setenv("ONEBOX_MAX_NUM_SEQS", "many")
    result = run_cli(*PLAN)
    assert result.code == 2
    assert "ONEBOX_MAX_NUM_SEQS: It takes a whole number, such as 32768, 32K" in result.err


def test_a_variable_that_is_no_option_is_said_once(run_cli, monkeypatch):
    monkeypatch.setenv("ONEBOX_MAX_MODLE_LEN", "5")
    result = run_cli("version")
    assert result.code == 0
    assert result.err.count("did you mean ONEBOX_MAX_MODEL_LEN?\n") == 1


def test_the_variables_of_a_kubernetes_service_named_onebox_are_not_settings():
    given = {"ONEBOX_PORT": "tcp://10.0.0.1:8000", "ONEBOX_SERVICE_HOST": "10.0.0.1", "ONEBOX_PORT_8000_TCP": "x"}
    assert read_settings(serve_parameters(), (), given).values == {}
    assert list(unknown_variables({"ONEBOX_PORT"}, given)) == []
    assert "ONEBOX_RESTARTED" not in os.environ
