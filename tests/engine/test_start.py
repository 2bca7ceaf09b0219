"""The engine allocates what the plan says, refuses what does not fit, and resolves what was left open."""

import importlib.util
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch

from onebox import LLM
from onebox.checkpoint.build import plan_build, run_build
from onebox.checkpoint.inspect import inspect_checkpoint
from onebox.checkpoint.recipe import BuildSources, Recipe, TargetFormat, open_source
from onebox.engine.api import Engine, Finished, Request, SamplingParams
from onebox.engine.config import SpeculationMethod
from onebox.engine.plan import EngineOptions, TokenInfo, plan_engine
from onebox.engine.start import allocate_memory, load_runner
from onebox.model.load import LoadFormat, load_model
from onebox.spec.conversion import CONVERSION_BYTES
from onebox.spec.errors import DoesNotFitError, MismatchError, UnsupportedError, UsageError
from onebox.spec.hardware import GIB, detect_box
from onebox.spec.modules import ModuleClass
from tests.drafters import small_drafter_config, write_drafter
from tests.model.opened import tensors_in
from tests.synthetic import tiny_config, write_checkpoint

NO_WORDS = TokenInfo()
HEADS = {"lm_head": "int8", "mtp_format": "int4"}
SMALL = EngineOptions(device="cpu", max_model_len=2048, kv_cache_memory_bytes=8 << 20)


def plan_for(checkpoint, **changes):
    return plan_engine(checkpoint, replace(SMALL, **changes), NO_WORDS)


def check_allocated_is_planned(plan):
    memory = allocate_memory(plan)
    # The scratch page is part of the plan's workspace.
    assert memory.page_pool_bytes == plan.memory.kv_bytes + plan.memory.page_bytes
    assert memory.state_bytes == plan.memory.states_bytes + plan.memory.prefix_bytes
    return memory


@pytest.mark.parametrize("speculation", ["none", "mtp", "ngram", "auto"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kv", ["bf16", "fp8", "turboquant", "turboquant_k8v4"])
def test_what_is_allocated_on_the_cpu_is_what_was_planned_to_the_byte(checkpoint, kv, dtype, speculation):
    check_allocated_is_planned(plan_for(checkpoint, kv_cache_dtype=kv, dtype=dtype, speculation=speculation))


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float16"])
def test_states_are_allocated_in_the_dtype_that_was_asked_for(checkpoint, state_dtype):
    plan = plan_for(checkpoint, mamba_ssm_cache_dtype=state_dtype)
    memory = check_allocated_is_planned(plan)
    assert str(memory.matrices.dtype) == f"torch.{state_dtype}"
    assert plan.memory_shape.state_dtype == plan.memory.request.state_dtype == state_dtype


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["bf16", "fp8", "turboquant"])
def test_what_the_gpu_hands_out_is_what_was_planned(tmp_path, kv):
    """The allocator rounds large tensors up to 2 MiB; nothing else is beyond the plan."""
    write_checkpoint(tmp_path / "model", "autoround", config=tiny_config())
    plan = plan_for(tmp_path / "model", device="cuda", kv_cache_dtype=kv, kv_cache_memory_bytes=256 << 20)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    memory = check_allocated_is_planned(plan)
    taken = torch.cuda.memory_allocated() - before
    planned = memory.page_pool_bytes + memory.state_bytes
    assert planned <= taken <= planned + (2 << 20) * 64


def weight_tensors(value):
    """Every tensor of a model, each once."""
    found = {}

    def walk(part):
        if isinstance(part, torch.Tensor):
            found[id(part) if part.is_mkldnn else part.data_ptr()] = part
        elif hasattr(part, "__dataclass_fields__"):
            for name in part.__dataclass_fields__:
                walk(getattr(part, name))
        elif isinstance(part, tuple):
            for item in part:
                walk(item)

    walk(value)
    return list(found.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("speculation", ["none", "mtp"])
def test_the_weights_take_what_was_planned_for_them(checkpoint, speculation, dtype):
    plan = plan_for(checkpoint, speculation=speculation, dtype=dtype)
    model = load_model(plan.directory, plan.device, plan.dtype, plan.load_format, with_mtp=speculation == "mtp")
    taken = sum(t.numel() * t.element_size() for t in weight_tensors(model))
    # The rotation's frequencies are no weights.
    assert taken - 4 * model.frequencies.numel() == plan.memory.weights_bytes


def test_a_plan_that_does_not_fit_is_refused_with_its_table(checkpoint):
    box = replace(detect_box(), memory_bytes=1 * GIB, available_bytes=None)
    with pytest.raises(DoesNotFitError, match=r"(?s)too large.*weights.*KV of one 32,768-token sequence"):
        plan_engine(checkpoint, replace(SMALL, max_model_len=32768), NO_WORDS, box)


def test_a_cache_beyond_the_box_is_refused(checkpoint):
    box = replace(detect_box(), memory_bytes=4 * GIB, available_bytes=None)
    with pytest.raises(DoesNotFitError, match=r"--kv-cache-memory-bytes \d+ asks for 400.00 GiB, but .* or less"):
        plan_engine(checkpoint, replace(SMALL, kv_cache_memory_bytes=400 * GIB), NO_WORDS, box)


def test_a_reader_that_is_not_installed_is_replaced_by_our_own_and_that_is_said(checkpoint, monkeypatch, caplog):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name == "fastsafetensors" else find_spec(name)
    )
    plan = plan_for(checkpoint, load_format="fastsafetensors")
    assert plan.load_format is LoadFormat.SAFETENSORS
    assert "fastsafetensors is not installed" in caplog.text
    assert "`pip install fastsafetensors`" in caplog.text


@pytest.fixture
def box_with_gpu(tmp_path, monkeypatch):
    """A machine whose nvidia-smi reports a GB10; torch finds no GPU, as in this test's own process."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\ncase $1 in *driver*) echo 580.95.05;; *) echo 'NVIDIA GB10, 12.1, [N/A], [N/A]';; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_that_torch_cannot_use_is_refused_with_what_to_install(checkpoint, box_with_gpu, device):
    with pytest.raises(UnsupportedError, match=r"GB10 .*driver 580\.95\.05.*is a build for CPUs(?s:.*)/whl/cu130"):
        plan_for(checkpoint, device=device)


def test_the_cpu_beside_a_gpu_is_planned_as_a_cpu(checkpoint, box_with_gpu):
    plan = plan_for(checkpoint, device="cpu")
    assert (plan.device.type, plan.memory.box.device) == ("cpu", "CPU only")


def test_what_is_left_open_is_resolved(checkpoint):
    plan = plan_for(checkpoint, dtype="float32")
    assert (plan.device.type, plan.dtype) == ("cpu", torch.float32)
    assert plan_for(checkpoint).dtype in (torch.float32, torch.bfloat16)
    assert plan.config.speculation.method is SpeculationMethod.AUTO
    assert plan.config.num_checkpoints > 0
    assert plan_for(checkpoint, enable_prefix_caching=False).config.num_checkpoints == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "tpu"}, "--device 'tpu' is not known"),
        ({"dtype": "int8"}, "--dtype 'int8' is not known"),
        ({"load_format": "pickle"}, "pickle"),
        ({"speculation": "medusa"}, "'medusa' is not known; give one of none, mtp, ngram, dflash, auto"),
        ({"speculation": "mtp", "num_speculative_tokens": 9}, "1 to 8 drafts per step, not 9"),
        ({"speculation": "mtp", "num_speculative_tokens": 0}, "1 to 8 drafts per step, not 0"),
        ({"max_num_batched_tokens": 100}, "multiple of 64"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens is 0"),
        ({"max_model_len": 0}, "--max-model-len is 0"),
        ({"kv_cache_dtype": "int3"}, "'int3' is not known"),
        ({"mamba_ssm_cache_dtype": "fp8"}, "--mamba-ssm-cache-dtype 'fp8' is not known"),
    ],
)
def test_a_wrong_option_is_one_sentence(checkpoint, options, says):
    with pytest.raises(UsageError, match=says):
        plan_for(checkpoint, **options)


def stretched(config, factor=4.0):
    """The override that stretches this config's context."""
    text = config["text_config"]
    rope = {**text["rope_parameters"], "rope_type": "yarn", "factor": factor}
    return {"text_config": {"rope_parameters": {**rope, "original_max_position_embeddings": 512}}}


def test_an_override_of_the_rotation_computes_what_the_same_config_does(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    overrides = stretched({**config, "text_config": {**config["text_config"], "max_position_embeddings": 512}})
    overrides["text_config"]["max_position_embeddings"] = 512
    changed = tmp_path / "changed"
    shutil.copytree(checkpoint, changed)
    config["text_config"] |= overrides["text_config"]
    (changed / "config.json").write_text(json.dumps(config))

    answers = []
    for model, given in [(checkpoint, overrides), (changed, {}), (checkpoint, {})]:
        options = {"device": "cpu", "kv_cache_memory_bytes": 32 << 20, "hf_overrides": given}
        with LLM(model, **options) as llm:
            (answer,) = llm.generate(["Once upon a time"], SamplingParams(max_tokens=8, temperature=0, logprobs=1))
            answers.append((llm.engine.config.max_model_len, answer.logprobs))
    overridden, stored, plain = answers
    assert overridden == stored
    assert overridden[0] == 2048
    assert plain[0] == 32768
    assert plain[1] != stored[1]


def test_a_length_beyond_the_model_is_refused_with_the_stretch_that_reaches_it(tmp_path):
    config = tiny_config(max_position_embeddings=512)
    model = write_checkpoint(tmp_path / "model", "bf16-fused", config=config)
    with pytest.raises(UsageError, match=r"1,500 is more than the 512 tokens") as caught:
        plan_for(model, max_model_len=1500)
    advised = json.loads(re.search("--hf-overrides '(.*)'", str(caught.value))[1])
    assert advised == stretched(config, factor=3.0)
    assert plan_for(model, max_model_len=1500, hf_overrides=advised).config.max_model_len == 1500
    with pytest.raises(UsageError, match=r"2,049 is more than the 2,048 tokens that the model supports; give that or"):
        plan_for(model, max_model_len=2049, hf_overrides=stretched(config))


def test_heads_converted_while_loading_answer_as_those_of_a_build(checkpoint, tmp_path):
    """With their drafts: the same tokens, logprobs and accepted drafts; without the flags, others."""
    recipe = Recipe(lm_head=TargetFormat.INT8, mtp=TargetFormat.INT4)
    run_build(plan_build(recipe, BuildSources(open_source("base", checkpoint))), tmp_path / "built")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    answers = []
    for model, given in [(checkpoint, HEADS), (tmp_path / "built", {}), (tmp_path / "built", HEADS), (checkpoint, {})]:
        options = {"device": "cpu", "max_model_len": 256, "kv_cache_memory_bytes": 8 << 20, "speculation": "mtp"}
        with LLM(model, **options, **given) as llm:
            (answer,) = llm.generate(["Once upon a time"], params)
            answers.append((answer.token_ids, answer.logprobs, answer.prompt_logprobs, answer.counts))
    converted, built, built_again, stored = answers
    assert converted == built == built_again
    assert converted[2] != stored[2]


def test_the_plan_counts_converted_weights_and_what_converting_takes(tmp_path, monkeypatch):
    """On a GPU, where weights keep their stored size: the sizes of a build; a box without room for it is refused."""
    model = write_checkpoint(tmp_path / "model", "bf16-fused")
    monkeypatch.setattr("onebox.engine.plan._device", lambda *_: torch.device("cuda"))
    kept, converted = plan_for(model, dtype="bfloat16"), plan_for(model, dtype="bfloat16", **HEADS)
    found = inspect_checkpoint(model, conversion=converted.conversion).class_bytes
    loaded = sum(size for kind, size in found.items() if kind is not ModuleClass.VISION)
    with_tower = loaded + found[ModuleClass.VISION]
    assert converted.memory.weights_bytes in (loaded, with_tower)
    assert converted.memory.weights_bytes < kept.memory.weights_bytes
    assert kept.memory.request.loading_bytes == 0
    assert converted.memory.request.loading_bytes == CONVERSION_BYTES
    assert converted.memory.workspace_bytes - kept.memory.workspace_bytes > CONVERSION_BYTES // 2
    assert "converted while loading" in converted.memory.parts[0].note


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lm_head": "int4"}, "--lm-head int4 is not known while loading"),
        ({"mtp_format": "int8"}, "--mtp-format int8 is not known while loading"),
        ({"mtp_format": "int4", "speculation": "none"}, "--mtp-format int4 has nothing to act on: drafts by none"),
        ({"mtp_format": "int4", "speculation": "ngram"}, "--mtp-format int4 has nothing to act on: drafts by ngram"),
        ({"lm_head": "int8", "load_format": "dummy"}, "--lm-head int8 has nothing to act on: dummy weights"),
    ],
)
def test_a_conversion_without_effect_is_refused(checkpoint, changes, words):
    with pytest.raises(UsageError, match=words):
        plan_for(checkpoint, **changes)


def test_offline_answers_come_in_the_order_of_the_prompts(checkpoint, tokenizer):
    prompts = ["one", "two two", tokenizer.encode("three"), *["x" * n for n in range(1, 9)]]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    options = {"max_model_len": 256, "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 2, "max_num_waiting": 1}
    with LLM(checkpoint, **options) as llm:
        together = llm.generate(prompts, params)
        apart = [llm.generate([prompt], params)[0] for prompt in prompts]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in apart]
    assert [answer.logprobs for answer in together] == [answer.logprobs for answer in apart]
    for answer in together:
        assert len(answer.token_ids) == len(answer.logprobs) == 6
        assert answer.text == tokenizer.decode(answer.token_ids)
        assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids) - 1


def test_an_unknown_option_of_offline_use_is_refused_by_name(checkpoint):
    with pytest.raises(UsageError, match="no option 'max_len'"):
        LLM(checkpoint, max_len=5)


@pytest.fixture(scope="module")
def drafter(checkpoint, tmp_path_factory):
    """A DFlash drafter's directory for the tiny checkpoint."""
    target = json.loads((checkpoint / "config.json").read_text())
    return write_drafter(tmp_path_factory.mktemp("drafter") / "tiny-dflash", small_drafter_config(target))


@pytest.mark.parametrize("method", ["dflash", "auto"])
def test_a_drafter_is_planned_allocated_and_drafts(checkpoint, drafter, method):
    plan = plan_for(checkpoint, max_num_seqs=2, speculation=method, draft_model=drafter)
    assert (plan.config.speculation.block_size, plan.config.speculation.max_drafts) == (8, 7)
    runner = load_runner(plan)
    check_allocated_is_planned(plan)
    drafter_bytes = sum(tensor.nbytes for tensor in tensors_in(runner._model.drafter))
    small = sum(tensor.nbytes for tensor in (runner._model.drafter.places, runner._model.drafter.frequencies))
    small += runner._model.drafter.key_norms.nbytes
    assert drafter_bytes == plan.memory.request.drafter_bytes + small
    with Engine(runner, plan.config) as engine:
        handle = engine.submit(Request("a", (1, 2, 3), SamplingParams(max_tokens=20, ignore_eos=True)))
        *_, last = handle
        assert isinstance(last, Finished)
        assert engine.stats().totals.num_steps < 25
        if method == "dflash":
            assert engine.stats().totals.drafts.num_drafted > 20


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"speculation": "dflash"}, "needs a drafter"),
        ({"speculation": "mtp", "draft_model": "x"}, "nothing to act on with speculation by mtp"),
        ({"speculation": "dflash", "draft_model": "/no/such"}, "not a directory"),
    ],
)
def test_a_drafter_that_is_missing_or_useless_is_refused(checkpoint, options, says):
    with pytest.raises(UsageError, match=says):
        plan_engine(checkpoint, EngineOptions(device="cpu", **options), TokenInfo())


def test_more_drafts_than_a_block_holds_are_refused(checkpoint, drafter):
    options = EngineOptions(device="cpu", speculation="dflash", draft_model=drafter, num_speculative_tokens=8)
    with pytest.raises(UsageError, match="blocks of 8 rows hold 7 drafts, not 8"):
        plan_engine(checkpoint, options, TokenInfo())


def test_a_drafter_of_another_model_is_refused_with_the_reason(checkpoint, drafter, tmp_path):
    config = json.loads((drafter / "config.json").read_text())
    other = write_drafter(tmp_path / "other", config | {"hidden_size": config["hidden_size"] * 2})
    options = EngineOptions(device="cpu", speculation="dflash", draft_model=other)
    with pytest.raises(MismatchError, match="made for another model: its hidden_size"):
        plan_engine(checkpoint, options, TokenInfo())
