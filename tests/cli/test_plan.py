"""`onebox plan` as people type it, and that it runs on a laptop without torch."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from onebox.cli.plan import plan
from onebox.engine.api import EngineOptions
from onebox.planner.memory import DEFAULT_DRAFTS
from onebox.spec.errors import DoesNotFitError, UsageError
from onebox.spec.shapes import SHAPES

MODEL = "qwen3.5-122b-a10b"


def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(plan)
    return made


def run(*arguments: str, model: str = MODEL) -> str:
    result = CliRunner().invoke(app(), [model, *arguments])
    if result.exception:
        raise result.exception
    return result.stdout


@pytest.mark.parametrize("extra", [(), ("--speculative-tokens", "2", "--acceptance", "0.9,0.72")])
def test_the_plan_fits_one_screen(extra):
    lines = run(*extra).splitlines()
    assert len(lines) <= 56
    assert max(len(line) for line in lines) <= 100


SPARK_RECORD = ("--acceptance", "0.9,0.72", "--context", "2048")
"""One stream with two drafts, as the published records are."""


def engine_speed(*arguments: str) -> float:
    return json.loads(run("--json", *SPARK_RECORD, *arguments))["projected"][-1]["engine"]["tokens_per_second"]


def test_a_spark_reaches_its_goals_with_the_assumptions_as_they_were():
    """58 tok/s with INT4, 66 with 3-bit experts, this engine's overhead counted."""
    assert engine_speed() > 58
    assert engine_speed("--weights", "hybrid-int3") > 66
    found = json.loads(run("--json", *SPARK_RECORD))
    assert found["assumptions"][:3] == ["acceptance 0.9, 0.72", "225 GB/s", "experts chosen independently"]
    assert found["assumptions"][3] == "585 kernels at 1.9 us each"


FLAGS = {
    "--draft-vocab full": ("--draft-vocab", "full"),
    "--mamba-ssm-cache-dtype bfloat16": ("--mamba-ssm-cache-dtype", "bfloat16"),
    "--kv-cache-dtype fp8": ("--kv-cache-dtype", "fp8"),
    "--kv-cache-dtype turboquant": ("--kv-cache-dtype", "turboquant"),
    "build --mtp keep": ("--weights", "hybrid-mtp16"),
    "build --experts int3": ("--weights", "hybrid-int3"),
    "build --experts int3 --experts-down int4": ("--weights", "hybrid-int34"),
    "build --experts int2": ("--weights", "hybrid-int2"),
    "build --shared int4": (),
    "temperature 0 or top_k up to 64": (),
}


def test_a_lever_brings_what_a_plan_with_it_says():
    """Each lever is planned for itself; what `build` writes differs from published layouts by less than 0.2%."""
    found = json.loads(run("--json", *SPARK_RECORD))
    assert {lever["how"] for lever in found["levers"]} == FLAGS.keys()
    before = found["projected"][-1]["expected_bytes"]["total"]
    for lever in found["levers"]:
        if not FLAGS[lever["how"]]:
            continue
        alone = json.loads(run("--json", *SPARK_RECORD, *FLAGS[lever["how"]]))["projected"][-1]
        saved = before - alone["expected_bytes"]["total"]
        assert lever["saved_bytes"] == pytest.approx(saved, abs=0.002 * before), lever
        assert lever["tokens_per_second"] == pytest.approx(alone["engine"]["tokens_per_second"], rel=0.003), lever
        assert saved != 0


def test_without_an_acceptance_levers_have_milliseconds():
    found = json.loads(run("--json"))
    assert all(lever["tokens_per_second"] is None and lever["step_seconds"] > 0 for lever in found["levers"])
    assert "ms a step" in run()
    assert "ms a step" not in run(*SPARK_RECORD)


def test_a_plan_without_drafts_has_no_levers_of_drafting():
    parts = {lever["part"] for lever in json.loads(run("--json", "--speculative-tokens", "0"))["levers"]}
    assert parts == {"DeltaNet state", "KV cache", "routed experts", "shared experts", "LM head"}


def test_a_head_in_bf16_is_said_with_its_cost_and_the_command():
    (note,) = json.loads(run("--json", *SPARK_RECORD, "--weights", "hybrid-mtp16"))["notes"]
    assert "The MTP head is stored in bf16. A step with 2 drafts reads 0.65 GB more" in note
    assert re.search(r"54\.\d tok/s instead of 58\.\d, projected for dgx-spark at acceptance 0\.9, 0\.72", note)
    assert "`onebox build --base DIR --out NEW` quantises it" in note
    for weights in ("hybrid", "fp8", "bf16"):
        found = json.loads(run("--json", *SPARK_RECORD, "--weights", weights, model="qwen3.5-35b-a3b"))
        assert found["notes"] == [], "quantised as the body is, or a body that is not quantised either"
    assert json.loads(run("--json", "--weights", "hybrid-mtp16", "--mtp-format", "int4", *SPARK_RECORD))["notes"] == []


def test_the_plan_tells_memory_capacity_bytes_and_speed():
    text = run("--speculative-tokens", "2", "--acceptance", "0.9,0.72")
    for words in ("weights", "reserve", "121.70", "turboquant", "routed experts", "limit at 273 GB/s", "projected"):
        assert words in text


def test_json_is_one_object_whose_parts_sum():
    plan = json.loads(run("--json", "--speculative-tokens", "2", "--acceptance", "0.9,0.72", "--streams", "2"))
    assert sum(part["bytes"] for part in plan["memory"]["parts"]) == plan["memory"]["total_bytes"]
    plain, drafted = plan["projected"]
    assert (plain["drafts"], drafted["drafts"]) == (0, 2)
    assert drafted["tokens_per_step"] == pytest.approx(2.62)
    parts = dict(drafted["expected_bytes"])
    assert parts.pop("total") == sum(parts.values())
    assert drafted["limit"]["tokens_per_second"] > drafted["expected"]["tokens_per_second"]


def test_a_box_of_unknown_bandwidth_says_so(monkeypatch):
    from onebox.spec import hardware

    monkeypatch.setattr(hardware, "_nvidia_smi", lambda: None)
    monkeypatch.setattr(hardware, "_meminfo", lambda: "MemTotal: 134217728 kB\nMemAvailable: 104857600 kB\n")
    text = run("--box", "auto")
    assert "bandwidth unknown" in text
    assert "No bandwidth is known for CPU only" in text
    assert "other programs use that much memory now" in text


def test_without_flags_it_plans_what_serve_would_do():
    options, plan = EngineOptions(), json.loads(run("--json"))
    assert plan["memory"]["max_num_seqs"] == options.max_num_seqs
    assert [projected["drafts"] for projected in plan["projected"]] == [0, DEFAULT_DRAFTS]
    assert (options.draft_vocab, options.mamba_ssm_cache_dtype) == ("auto", "auto")
    assert plan["projected"][1]["draft_vocab_size"] == 40_960
    auto = json.loads(run("--json", "--draft-vocab", "auto", "--mamba-ssm-cache-dtype", "auto"))
    assert auto["projected"] == plan["projected"]
    assert json.loads(run("--json", "--max-num-batched-tokens", "2048"))["memory"] == plan["memory"]


def test_the_acceptance_says_how_many_drafts():
    assert json.loads(run("--json", "--acceptance", "0.9,0.72"))["projected"][1]["drafts"] == 2


def test_first_tokens_of_lengths_beyond_the_context_are_left_out():
    lengths = [times["tokens"] for times in json.loads(run("--json", "--max-model-len", "10000"))["prompts"]]
    assert lengths == [2048, 8192]


def test_prefixes_on_disk_have_their_bytes_and_the_seconds_to_read_them():
    plan = json.loads(run("--json", "--disk-gb-per-second", "2"))
    memory, prefix = plan["memory"], plan["prefixes_on_disk"][-1]
    assert prefix["num_tokens"] == (100_000 - 512) // 64 * 64
    pages_bytes = prefix["num_tokens"] // memory["page_tokens"] * memory["page_bytes"]
    assert 0 < prefix["num_bytes"] - pages_bytes < 500e6, "the state beside the pages"
    assert prefix["read_seconds"] == prefix["num_bytes"] / 2e9
    assert prefix["first_token_seconds"] < plan["prompts"][-1]["cold_seconds"] / 10
    (row,) = [line for line in run().splitlines() if line.startswith("the same on disk ")]
    assert f"({prefix['num_bytes'] / 1e9:.2f} GB)" in row


def test_unknown_acceptance_says_so():
    assert "Give --acceptance for an expectation" in run("--speculative-tokens", "2")


def test_a_chosen_format_that_is_not_compared_is_added():
    assert "turboquant_k8v3 (chosen)" in run("--kv-cache-dtype", "turboquant_k8v3")


def test_a_format_that_does_not_fit_is_marked():
    text = run("--kv-cache-dtype", "turboquant", "--reserve-gib", "49")
    assert "does not fit" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--box", "h100"), "--box 'h100' is not known"),
        (("--disk-gb-per-second", "0"), "--disk-gb-per-second is 0.0"),
        (("--weights", "q4"), "--weights 'q4' is not known"),
        (("--kv-cache-dtype", "int4"), "--kv-cache-dtype 'int4' is not known"),
        (("--mamba-ssm-cache-dtype", "fp8"), "--mamba-ssm-cache-dtype 'fp8' is not known"),
        (("--max-model-len", "0"), "--max-model-len is 0"),
        (("--max-model-len", "300000"), "--max-model-len 300,000 is more than"),
        (("--max-num-seqs", "0"), "--max-num-seqs is 0"),
        (("--gpu-memory-utilization", "90"), "--gpu-memory-utilization 90.0 is not a fraction"),
        (("--reserve-gib", "-1"), "--reserve-gib is -1.0"),
        (("--reserve-gib", "nan"), "--reserve-gib is nan"),
        (("--reserve-gib", "9", "--gpu-memory-utilization", "0.9"), "give one of them"),
        (("--speculative-tokens", "-1"), "--speculative-tokens is -1"),
        (("--acceptance", "0.9", "--speculative-tokens", "2"), "--acceptance has 1 values for --speculative-tokens 2"),
        (("--context", "-1"), "--context is -1"),
        (("--context", "9000", "--max-model-len", "8192"), "--context 9,000 is more than --max-model-len 8,192"),
        (("--streams", "0"), "--streams is 0"),
        (("--streams", "9"), "--streams 9 is more than --max-num-seqs 8"),
        (("--draft-vocab", "most"), "--draft-vocab 'most' is not known"),
        (("--draft-vocab", "0"), "--draft-vocab is 0; give 1 to 248,320"),
    ],
)
def test_a_wrong_value_is_refused_by_flag(arguments, sentence):
    with pytest.raises(UsageError) as caught:
        run(*arguments)
    assert sentence in str(caught.value)


def test_an_unknown_model_is_refused_by_name():
    with pytest.raises(UsageError, match="'llama' is neither a directory nor a known model"):
        run(model="llama")


def test_a_preset_for_a_directory_is_refused(tmp_path):
    with pytest.raises(UsageError, match="has weights of its own"):
        run("--weights", "hybrid", model=str(tmp_path))


def test_weights_that_do_not_fit_are_refused_with_a_table():
    with pytest.raises(DoesNotFitError, match=r"weights +232.99 GiB"):
        run("--weights", "bf16", "--speculative-tokens", "2")


def test_what_a_model_that_does_not_fit_would_take_is_said():
    with pytest.raises(DoesNotFitError) as caught:
        run("--speculative-tokens", "0", model="Qwen/Qwen3.5-397B-A17B")
    text = str(caught.value)
    assert "the weights leave no room for any context" in text
    assert re.search(r"hybrid +195\.0 +206\.1 +2 ", text)
    assert "No format fits one dgx-spark, and onebox runs on one box" in text
    with pytest.raises(DoesNotFitError, match=r"hybrid-int34, hybrid, .*autoround-int4, .* would fit: give --weights"):
        run("--weights", "bf16")


def test_a_directory_that_does_not_fit_is_one_row_of_the_table(checkpoints, monkeypatch):
    from onebox.spec import hardware

    small = replace(hardware.BOXES["dgx-spark"], memory_bytes=1 << 30)
    monkeypatch.setitem(hardware.BOXES, "dgx-spark", small)
    with pytest.raises(DoesNotFitError, match=r"this checkpoint +0\.0 "):
        run(model=str(checkpoints / "fp8"))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}


def test_a_stretched_model_is_planned_to_a_million_tokens():
    rope = {**SHAPES[MODEL]["text_config"]["rope_parameters"], **YARN}
    overrides = ("--hf-overrides", json.dumps({"text_config": {"rope_parameters": rope}}))
    found = json.loads(run(*overrides, "--max-model-len", "1010000", "--kv-cache-dtype", "fp8", "--json"))
    assert found["memory"]["max_model_len_tokens"] == 1_010_000
    assert "at 1,010,000" in run(*overrides, "--max-model-len", "1010000")
    assert "at 1,048,576" in run(*overrides), "the stretched length is the default"
    with pytest.raises(UsageError, match=r"1,048,577 is more than the 1,048,576 tokens that the model supports; give"):
        run(*overrides, "--max-model-len", "1048577")
    with pytest.raises(UsageError, match=r"1,010,000 is more than the 262,144 .* --hf-overrides"):
        run("--max-model-len", "1010000")
    with pytest.raises(UsageError, match="--hf-overrides is not JSON"):
        run("--hf-overrides", "{")


@pytest.mark.parametrize(("name", "ours"), [("auto", "bf16"), ("fp8_e4m3", "fp8"), ("turboquant35", "turboquant_k4v4")])
def test_a_kv_format_may_have_its_name_in_vllm(name, ours):
    assert run("--kv-cache-dtype", name) == run("--kv-cache-dtype", ours)


def test_states_of_16_bits_are_planned_and_projected_so():
    whole, narrow = (json.loads(run("--json", *flags)) for flags in ((), ("--mamba-ssm-cache-dtype", "float16")))
    assert [found["memory"]["mamba_ssm_cache_dtype"] for found in (whole, narrow)] == ["float32", "float16"]
    half = 36 * 4_194_304 // 2
    assert whole["memory"]["slot_bytes"] - narrow["memory"]["slot_bytes"] == half
    totals = [found["projected"][0]["expected_bytes"]["total"] for found in (whole, narrow)]
    assert totals[0] - totals[1] == 2 * half


def test_fewer_prompt_tokens_in_a_step_leave_more_memory_for_kv():
    sizes = [json.loads(run("--max-num-batched-tokens", count, "--json"))["memory"] for count in ("2048", "8192")]
    assert sizes[0]["kv_tokens"] > sizes[1]["kv_tokens"]


def test_planning_loads_no_torch():
    script = (
        "import sys\n"
        "from onebox.cli.main import app\n"
        "import onebox.planner.memory, onebox.planner.presets, onebox.planner.report, onebox.planner.roofline\n"
        "import onebox.planner.vllm_accounting\n"
        f"app(['plan', {MODEL!r}], standalone_mode=False)\n"
        "loaded = {'torch', 'numpy', 'transformers', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_heads_converted_while_loading_are_counted_so(checkpoints):
    """By name and from a directory: fewer bytes of weights, and more tokens of KV."""
    for model, extra in ((MODEL, ("--weights", "autoround-int4")), (str(checkpoints / "autoround"), ())):
        kept, converted = (
            json.loads(run("--json", "--speculative-tokens", "2", *extra, *flags, model=model))
            for flags in ((), ("--lm-head", "int8", "--mtp-format", "int4"))
        )
        classes = [plan["weights"]["class_bytes"] for plan in (kept, converted)]
        assert classes[1]["lm head"] < 0.52 * classes[0]["lm head"]
        assert classes[1]["mtp experts"] < 0.27 * classes[0]["mtp experts"]
        assert classes[1]["experts"] == classes[0]["experts"]
        assert "--lm-head int8, --mtp-format int4" in converted["weights"]["source"]


def test_a_conversion_of_what_is_quantised_otherwise_is_refused():
    with pytest.raises(UsageError, match="--mtp-format int4 has nothing to act on: fp8 stores its mtp"):
        run("--weights", "fp8", "--mtp-format", "int4")
