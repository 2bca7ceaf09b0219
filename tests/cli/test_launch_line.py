"""Launch lines of vLLM: every published one starts, or says in one line per flag why not."""

import json
import re
import shlex
import shutil
import socket
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from typer.main import get_command

import onebox.cli.serve as command
from onebox.cli.launch_line import read_launch_line
from onebox.cli.main import app
from onebox.cli.vllm_flags import FLAGS, KV_NAMES, LIST_FLAGS, SHORT_NAMES
from onebox.engine.plan import TokenInfo, plan_engine
from onebox.spec.kv import KVFormat
from tests.drafters import small_drafter_config, write_drafter
from tests.server.launching import started

LINES = tomllib.loads((Path(__file__).parent / "launch_lines.toml").read_text())["line"]
STARTING = [line for line in LINES if not line["refused"]]
REPLACED = {"--host": "127.0.0.1", "--port": "0", "--max-model-len": "2048"}
QUESTION = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24}
OPTIONS = {
    name: not option.is_flag
    for option in get_command(app).commands["serve"].params
    if option.param_type_name == "option"
    for name in (*option.opts, *option.secondary_opts)
}


def read(text: str):
    return read_launch_line(shlex.split(text), OPTIONS)


def words_of(line: dict, model: Path) -> list[str]:
    """The line's words behind `vllm serve`, with model, host, port and length replaced."""
    words = shlex.split(line["command"].replace("\\\n", " "))
    words = words[words.index("serve") + 1 :]
    words = [word.replace(words[0], str(model)) for word in words]
    for flag, value in REPLACED.items():
        if flag in words:
            words[words.index(flag) + 1] = value
    return words


@pytest.fixture
def parsed(run_cli, monkeypatch, tmp_path, checkpoint):
    """Runs `onebox serve` up to where the server would be started: (what was printed, the options)."""
    found = []
    monkeypatch.setattr(command, "_serve", lambda options, _: found.append(options) or 0)
    monkeypatch.setattr(command, "log_in_background", lambda _: None)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(command, "end_process", lambda status: (_ for _ in ()).throw(SystemExit(status)))
    # In their containers this file lies in the working directory.
    (tmp_path / "unsloth.jinja").write_text((checkpoint / "chat_template.jinja").read_text())
    monkeypatch.chdir(tmp_path)

    def run(words):
        result = run_cli("serve", *words)
        return result, found[-1] if found else None

    return run


def is_foreign(word: str) -> bool:
    name = SHORT_NAMES.get(word, word).split(".")[0].lstrip("-").replace("_", "-")
    return word.startswith("-") and (name in FLAGS or name == "enable-turboquant")


@pytest.mark.parametrize("line", STARTING, ids=[line["source"] for line in STARTING])
def test_a_published_launch_line_is_planned_and_each_flag_without_effect_is_explained(parsed, checkpoint, line):
    words = words_of(line, checkpoint)
    result, options = parsed(words)
    assert result.code == 0, result.err
    foreign = [word for word in words if is_foreign(word)]
    said = result.out.splitlines()
    assert [sum(text.startswith(word) for text in said) for word in foreign] == [1] * len(foreign), result.out
    assert options.model == checkpoint
    small = replace(options.engine, device="cpu", max_num_batched_tokens=512, load_format="auto")
    plan = plan_engine(checkpoint, small, TokenInfo())
    if "--speculative-config" in words:
        asked = json.loads(words[words.index("--speculative-config") + 1])
        assert plan.config.speculation.max_drafts == asked["num_speculative_tokens"]
        assert plan.config.speculation.with_mtp


@pytest.mark.parametrize("line", [line for line in LINES if line["refused"]], ids=lambda line: line["source"])
def test_a_published_launch_line_that_cannot_be_honoured_says_why_in_one_line_per_flag(parsed, checkpoint, line):
    result, options = parsed(words_of(line, checkpoint))
    assert (result.code, options) == (2, None)
    said = result.err.removeprefix("onebox: ").splitlines()
    assert len(said) == len(line["refused"])
    for flag, text in zip(line["refused"], said, strict=True):
        assert text.startswith(flag)
        assert text.endswith(".")


@pytest.mark.parametrize("name", ["run-qwen.sh"])
def test_the_pocket_model_serves_with_a_published_line_and_tells_its_speeds(name, monkeypatch):
    """One that says much: drafts, generation defaults, a loader of its own."""
    from onebox.pocket.ready import pocket_checkpoint

    model = pocket_checkpoint()
    (line,) = (line for line in LINES if name in line["source"])
    words = [word for word in words_of(line, model) if word not in ("--port", "0")]
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind("")  # to a name that is free
    monkeypatch.setenv("NOTIFY_SOCKET", "@" + manager.getsockname()[1:].decode())
    with manager, started(*words, "--log-stats-interval", "0.1") as (process, url):
        manager.settimeout(30)
        assert manager.recv(100) == b"READY=1"
        assert httpx.post(f"{url}/v1/chat/completions", json=QUESTION).status_code == 200
        said = next(line for line in process.stdout if "Mean acceptance length: " in line)
        assert "Avg generation throughput: " in said
        # Nobody reads any more; the lines still to come hold up no answer.
        process.stdout.close()
        for _ in range(3):
            assert httpx.post(f"{url}/v1/chat/completions", json=QUESTION).status_code == 200
            time.sleep(0.2)
        assert process.poll() is None


def test_underscores_and_short_names_are_the_same_flags():
    line = read("DIR --max_model_len=32K --trust_remote_code -tp 1 -O3 --no-enable-prefix-caching")
    assert line.arguments == ["--max-model-len", "32768", "--no-enable-prefix-caching", "--", "DIR"]
    assert [notice.split(":")[0] for notice in line.notices] == ["--trust_remote_code", "-tp 1", "-O"]
    assert not line.refusals


@pytest.mark.parametrize(
    ("given", "read_as"), [("32k", "32000"), ("1.5K", "1536"), ("25G", str(25 << 30)), ("4096", "4096"), ("x", "x")]
)
def test_counts_are_read_as_vllm_reads_them(given, read_as):
    assert read(f"--kv-cache-memory-bytes {given}").arguments[-1] == read_as


def test_a_length_left_to_vllm_is_the_models_own():
    line = read("--max-model-len -1")
    assert not line.arguments
    assert line.notices == ["--max-model-len -1: the model's limit, which is the default here."]


def test_parts_of_a_config_are_put_together():
    line = read(
        "--speculative-config.method mtp --speculative-config.num_speculative_tokens 2 --attention-config.backend x"
    )
    assert line.arguments[0] == "--speculative-config"
    assert json.loads(line.arguments[1]) == {"method": "mtp", "num_speculative_tokens": 2}


def test_the_model_may_be_given_by_name_or_behind_flags_with_values():
    assert read("--model DIR --port 1").arguments == ["--port", "1", "--", "DIR"]
    assert read("--attention-backend FLASHINFER DIR").arguments == ["--", "DIR"]


@pytest.mark.parametrize("name", KV_NAMES)
def test_a_turboquant_name_of_vllm_is_a_format_with_at_least_its_bits(name):
    line = read(f"--kv-cache-dtype {name} --enable-turboquant --turboquant-metadata-path /models/kv.json")
    kv = KVFormat.parse(line.arguments[1])
    least = {"35": 3.5, "25": 2.5, "asym": 3.5, "4bit": 4, "3bit": 3}
    bits = next((bits for part, bits in least.items() if part in name), 4)
    assert kv.value_bits >= bits
    assert kv.key_bits >= (8 if "q8k" in name else 3 if "k3" in name else bits)
    assert len(line.notices) == 3


def test_the_dtype_of_states_reaches_the_engine(parsed, checkpoint):
    words = [str(checkpoint), "--mamba-ssm-cache-dtype", "float16", "--mamba-cache-dtype", "auto"]
    result, options = parsed(words)
    assert options.engine.mamba_ssm_cache_dtype == "float16", result.output


def test_turboquant_alone_is_a_kv_format_and_beside_another_one_a_contradiction():
    assert read("--enable-turboquant").arguments == ["--kv-cache-dtype", "turboquant"]
    (refusal,) = read("--enable-turboquant --kv-cache-dtype fp8").refusals
    assert refusal.startswith("--enable-turboquant contradicts --kv-cache-dtype fp8")


def test_everything_that_is_wrong_is_said_at_once():
    line = read("DIR --tensor-parallel-size 2 --frobnicate 7 --no-enable-chunked-prefill --max-mode-len 3 --port")
    assert [text.split(" is ")[0] for text in line.refusals] == [
        "--tensor-parallel-size 2",
        "--frobnicate",
        "--no-enable-chunked-prefill",
        "--max-mode-len",
        "--port needs a value.",
    ]
    assert "did you mean --max-model-len?" in line.refusals[3]


def test_an_mtp_head_of_another_model_is_refused_and_the_served_ones_is_not(parsed, checkpoint):
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    own = json.dumps({**drafts, "model": str(checkpoint)})
    assert parsed([checkpoint, "--speculative-config", own])[0].code == 0
    result, _ = parsed([checkpoint, "--speculative-config", json.dumps({**drafts, "model": "other"})])
    assert result.code == 2
    assert "names the model 'other'" in result.err
    assert "--mtp-from" in result.err


@pytest.mark.parametrize(("style", "is_json"), [((), False), (("--log-format", "json"), True)])
def test_what_is_explained_has_the_style_of_the_log(parsed, checkpoint, style, is_json):
    result, _ = parsed([checkpoint, "-tp", "1", *style])
    (line,) = result.out.splitlines()
    said = json.loads(line) if is_json else {"level": "info", "message": line}
    assert (said["level"], said["message"].partition(":")[0]) == ("info", "-tp 1")
    assert parsed([checkpoint, "-tp", "1", "--log-level", "warning", *style])[0].out == ""


def test_variables_of_vllm_are_said_to_have_no_effect(parsed, checkpoint, monkeypatch):
    monkeypatch.setenv("VLLM_MARLIN_USE_ATOMIC_ADD", "1")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    result, _ = parsed([checkpoint])
    names = "VLLM_API_KEY, VLLM_MARLIN_USE_ATOMIC_ADD"
    assert f"{names}: settings of vLLM in the environment, which onebox does not read." in result.out
    assert "secret" not in result.out


def test_quotes_of_a_forum_are_named(parsed, checkpoint):
    result, _ = parsed([checkpoint, "--speculative-config", "{“method”:“mtp”}"])
    assert "--speculative-config is not JSON (it has typographic quotes, write straight ones)" in result.err


VLLM_FLAGS = json.loads((Path(__file__).parent / "vllm_flags.json").read_text())
"""Of vLLM 0.32: what each takes. `make vllm-test` compares it with the installed one."""


def test_every_flag_of_vllm_is_honoured_explained_or_refused_with_a_reason():
    for name, takes in VLLM_FLAGS.items():
        if name in ("-h", "--help"):
            continue
        words = [name] if takes == "switch" else [name, "1"]
        line = read(" ".join(["DIR", *words, "--port", "7"]))
        assert not any("is no option" in text or "needs a value" in text for text in line.refusals), line.refusals
        # Neither more nor fewer words are taken than belong to it.
        assert " ".join(line.arguments).count("--port 7") == 1, line.arguments
        assert line.arguments[-1] == "DIR" or name == "--model", line.arguments
    assert {f"--{name}" for name in LIST_FLAGS} == {name for name, takes in VLLM_FLAGS.items() if takes == "list"}


def test_a_flag_with_a_list_takes_all_of_it_behind_the_model_and_one_before_it():
    line = read("DIR --served-model-name a b --cudagraph-capture-sizes 1 2 4 --port 7")
    assert line.arguments == shlex.split("--served-model-name a --served-model-name b --port 7 -- DIR")
    assert read("--served-model-name a DIR").arguments == ["--served-model-name", "a", "--", "DIR"]


def test_parts_of_parts_are_nested_also_under_short_names():
    line = read("--hf-overrides.text_config.rope_parameters.factor 2 -sc.method mtp --spec-tokens 3")
    values = dict(zip(line.arguments[::2], line.arguments[1::2], strict=True))
    assert json.loads(values["--hf-overrides"]) == {"text_config": {"rope_parameters": {"factor": 2}}}
    assert json.loads(values["--speculative-config"]) == {"method": "mtp", "num_speculative_tokens": 3}
    given = read("""--hf-overrides '{"text_config": {"a": 1}}' --hf-overrides.text_config.b 2""").arguments[1]
    assert json.loads(given) == {"text_config": {"a": 1, "b": 2}}


def test_a_token_is_not_repeated():
    line = read("DIR --hf-token hf_secret")
    assert "HF_TOKEN" in line.notices[0]
    assert "hf_secret" not in line.notices[0]


def test_no_flag_of_vllm_hides_an_option_of_ours():
    assert not OPTIONS.keys() & {f"--{name}" for name in FLAGS}
    assert not OPTIONS.keys() & SHORT_NAMES.keys()


def test_a_missing_chat_template_says_what_to_do(run_cli, checkpoint):
    result = run_cli("serve", checkpoint, "--port", "0", "--chat-template", "gone.jinja")
    assert result.code == 2
    assert "gone.jinja cannot be read (No such file or directory); give a file" in result.err


def test_a_missing_tokenizer_is_said_before_anything_is_loaded(run_cli, checkpoint, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    (broken / "tokenizer.json").unlink()
    result = run_cli("serve", broken, "--port", "0")
    assert result.code == 2
    assert "cannot be served: tokenizer.json is missing, so no text can be served: " in result.err
    assert "copy it from the model" in result.err


def test_the_unit_in_the_docs_starts_what_it_says(parsed, tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    unit = text.split("```ini\n")[1].split("```")[0]
    (line,) = re.findall(r"^ExecStart=\S+/onebox serve (.*)$", unit, re.MULTILINE)
    (tmp_path / "keys.toml").write_text('[[keys]]\nname = "smoke"\nkey = "sk-smoke"\n')
    result, options = parsed(shlex.split(line.replace("/etc/onebox", str(tmp_path))))
    assert result.code == 0, result.err
    assert options.settings.api_keys[0].name == "smoke"
    stop_s = int(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[1])
    assert stop_s >= options.http.shutdown_timeout + 10


def test_a_missing_picture_preprocessor_is_said_and_text_is_served(parsed, checkpoints, tmp_path, monkeypatch):
    directory = tmp_path / "model"
    shutil.copytree(checkpoints / "autoround", directory)
    (directory / "preprocessor_config.json").unlink()
    said = []
    monkeypatch.setattr(command, "say", lambda line, **_: said.append(line))
    _, options = parsed([directory])
    said.clear()
    command._check_side_files(directory, options)
    assert len(said) == 1
    assert said[0].startswith("preprocessor_config.json is missing, so images are refused and text works: ")
    said.clear()
    _, options = parsed([directory, "--language-model-only"])
    said.clear()
    command._check_side_files(directory, options)
    assert not said


def test_a_published_dflash_line_is_planned_with_its_drafter(parsed, checkpoint, tmp_path):
    target = json.loads((checkpoint / "config.json").read_text())
    drafter = write_drafter(tmp_path / "drafter", small_drafter_config(target))
    given = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": 5, "attention_backend": "FLASH_ATTN"}
    result, options = parsed([str(checkpoint), "--speculative-config", json.dumps(given)])
    assert result.code == 0, result.err
    assert "attention_backend: onebox has its own kernels" in result.out
    plan = plan_engine(checkpoint, replace(options.engine, device="cpu", load_format="auto"), TokenInfo())
    assert (plan.drafter.directory, plan.config.speculation.max_block_drafts) == (drafter, 5)
    assert "drafter" in {part.name for part in plan.memory.parts}
