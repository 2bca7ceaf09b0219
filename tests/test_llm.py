"""vLLM's offline snippets, with the import replaced."""

import pytest

from onebox import LLM, SamplingParams
from onebox.spec.errors import UsageError
from tests.server.conftest import wait_until

OPTIONS = {"kv_cache_memory_bytes": 16 << 20, "max_model_len": 400}


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(model=str(checkpoint), tensor_parallel_size=1, trust_remote_code=True, **OPTIONS) as model:
        yield model


def test_the_snippet_of_offline_inference(llm):
    prompts = ["Hello, my name is", "The capital of France is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=5, seed=3)
    outputs = llm.generate(prompts, sampling_params)
    for output, asked in zip(outputs, prompts, strict=True):
        prompt, generated_text = output.prompt, output.outputs[0].text
        assert prompt == asked
        assert generated_text == output.text == llm.tokenizer.decode(output.outputs[0].token_ids)
        assert output.finished
        assert output.request_id
    assert llm.generate(prompts[0], sampling_params=sampling_params)[0].text == outputs[0].text
    ids = {"prompt_token_ids": llm.tokenizer.encode(prompts[0])}
    assert llm.generate([ids], sampling_params, use_tqdm=False)[0].text == outputs[0].text


def test_the_snippet_of_chats_answers_what_the_template_renders(llm):
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Write an essay."},
    ]
    params = SamplingParams(temperature=0, max_tokens=5)
    (output,) = llm.chat(conversation, sampling_params=params, use_tqdm=False)
    text = llm.get_tokenizer().apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    (plain,) = llm.generate([text], params)
    assert output.prompt_token_ids == plain.prompt_token_ids
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    both = llm.chat([conversation, conversation[1:]], params)
    assert both[0].text == output.text
    assert len(both[1].prompt_token_ids) < len(both[0].prompt_token_ids)
    (quiet,) = llm.chat(conversation, params, chat_template_kwargs={"enable_thinking": False})
    assert quiet.prompt_token_ids != output.prompt_token_ids


def test_the_checkpoints_sampling_is_the_default_of_chats(llm):
    params = llm.get_default_sampling_params()
    assert params.temperature == llm._defaults.temperature
    assert params.top_k == llm._defaults.top_k


@pytest.mark.parametrize(
    ("options", "says"),
    [({"tensor_parallel_size": 2}, "one GPU"), ({"unheard_of": 1}, "no option 'unheard_of'")],
)
def test_what_cannot_be_honoured_is_refused(checkpoint, options, says):
    with pytest.raises(UsageError, match=says):
        LLM(checkpoint, **options)


def test_several_answers_to_a_prompt_are_those_of_the_following_seeds(llm):
    params = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=6)
    first, second = llm.generate(["Hello", "Bye"], params)
    assert [answer.index for answer in first.outputs] == [0, 1, 2]
    alone = [llm.generate("Hello", SamplingParams(temperature=0.9, seed=seed, max_tokens=6))[0] for seed in (5, 6, 7)]
    assert [answer.token_ids for answer in first.outputs] == [answer.token_ids for answer in alone]
    assert len({tuple(answer.token_ids) for answer in first.outputs}) > 1
    assert (second.prompt, len(second.outputs)) == ("Bye", 3)


def test_a_stop_string_ends_an_answer_and_is_cut_off_unless_asked_for(llm):
    options = {"temperature": 0.9, "seed": 2, "max_tokens": 40, "ignore_eos": True}
    (whole,) = llm.generate("Hello", SamplingParams(**options))
    stop = whole.text[3:5]
    at = whole.text.index(stop)
    (cut,) = llm.generate("Hello", SamplingParams(**options, stop=["never said", stop]))
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole.text[:at], "stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < len(whole.token_ids)
    (kept,) = llm.generate("Hello", SamplingParams(**options, stop=stop, include_stop_str_in_output=True))
    assert kept.text == whole.text[: at + len(stop)]
    (unstopped,) = llm.generate("Hello", SamplingParams(**options, stop="never said"))
    assert (unstopped.text, unstopped.finish_reason, unstopped.stop_reason) == (whole.text, "length", None)


def test_defaults_may_be_changed_as_in_the_snippets_and_are_checked_when_used(llm):
    params = llm.get_default_sampling_params()
    params.max_tokens, params.top_k, params.temperature = 4, -1, 0.5
    (answer,) = llm.chat([{"role": "user", "content": "Hi"}], params, chat_template=None)
    assert len(answer.outputs[0].token_ids) <= 4
    params.temperature = -1
    with pytest.raises(UsageError, match="temperature is -1"):
        llm.generate("Hi", params)


def test_other_parameters_of_vllm_have_their_meaning(llm):
    options = {"temperature": 0, "max_tokens": 5}
    (silent,) = llm.generate("Hello", SamplingParams(**options, detokenize=False))
    assert (silent.text, len(silent.token_ids)) == ("", 5)
    (short,) = llm.generate("Hello", SamplingParams(**options, truncate_prompt_tokens=2, logprobs=1))
    assert short.prompt_token_ids == llm.tokenizer.encode("Hello")[-2:]
    assert short.cumulative_logprob == pytest.approx(sum(each.logprob for each in short.logprobs))
    biased = SamplingParams(**options, logit_bias={65: 100.0}, stop_token_ids=[66], spaces_between_special_tokens=False)
    (answer,) = llm.generate("Hello", biased)
    assert answer.token_ids == [65] * 5
    (chosen,) = llm.generate("Hello", SamplingParams(max_tokens=9, structured_outputs={"choice": ["yes", "no"]}))
    assert chosen.text in ("yes", "no")
    ended = llm.tokenizer.encode("<|im_end|>")[0]
    named = {**options, "logit_bias": {ended: 100.0}, "ignore_eos": True, "skip_special_tokens": False}
    assert llm.generate("Hello", SamplingParams(**named))[0].text == "<|im_end|>" * 5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n": 0}, "n is 0"),
        ({"n": 2, "best_of": 4}, "best_of is not supported"),
        ({"bad_words": ["x"]}, "logit_bias of -100"),
        ({"allowed_token_ids": [1]}, "structured_outputs"),
        ({"logits_processors": [len]}, "no code runs"),
        ({"stop": [""]}, "stop holds"),
        ({"stop": "x", "detokenize": False}, "needs the text"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
        ({"structured_outputs": {"jsn": {}}}, "exactly one of json"),
        ({"guided_decoding": {"json": "{"}}, "not JSON"),
        ({"top_k": -2}, "top_k is -2"),
    ],
)
def test_a_parameter_that_cannot_be_honoured_is_refused_when_it_is_given(options, says):
    with pytest.raises(UsageError, match=says):
        SamplingParams(**options)


def test_a_refused_prompt_leaves_nothing_running(llm):
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    with pytest.raises(UsageError, match="the context holds 400"):
        llm.generate(["Hi", "x" * 500], params)
    wait_until(lambda: not (llm.engine.stats().num_running or llm.engine.stats().num_waiting))


def test_generation_config_and_drafts_are_given_as_to_vllm(checkpoint):
    options = {"generation_config": "vllm", "override_generation_config": {"temperature": 0.25}}
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    with LLM(checkpoint, **OPTIONS, **options, **drafts) as model:
        assert model.get_default_sampling_params().temperature == 0.25
        assert model.engine.config.speculation.max_drafts == 3
    with pytest.raises(UsageError, match="num_speculative_tokens is"):
        LLM(checkpoint, speculative_config={"method": "mtp", "num_speculative_tokens": "many"})
