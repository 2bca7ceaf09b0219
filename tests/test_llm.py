"""vLLM's offline snippets, with the import replaced."""

import pytest

from onebox import LLM, SamplingParams
from onebox.spec.errors import UsageError

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
