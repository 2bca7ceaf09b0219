"""The tiny checkpoint's template behaves as Qwen3.5's (facts, section C), and templates are kept in their sandbox."""

import json

import pytest

from onebox.spec.errors import UnreadableError, UsageError
from onebox.text.chat import ChatTemplate

USER = {"role": "user", "content": " Hi \n"}
TOOL_CALL = {"function": {"name": "add", "arguments": {"a": 1, "names": ["é", "b"]}}}


def test_a_question_opens_thinking(template):
    assert template.render([USER]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_thinking_can_be_switched_off(template):
    off, on = (template.render([USER], {"enable_thinking": value}) for value in (False, True))
    assert off.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert on == template.render([USER])


def test_system_comes_first_or_not_at_all(template):
    system = {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}
    assert template.render([system, USER]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    with pytest.raises(UsageError, match="can only be the first"):
        template.render([USER, system])


def test_reasoning_of_earlier_turns_is_dropped_and_of_the_present_one_kept(template):
    earlier = {"role": "assistant", "content": "One.", "reasoning_content": "old thought"}
    written_out = {"role": "assistant", "content": "<think>\nold thought\n</think>\n\nTwo."}
    calling = {"role": "assistant", "content": "", "reasoning_content": "new thought", "tool_calls": [TOOL_CALL]}
    results = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}]
    text = template.render([USER, earlier, USER, written_out, USER, calling, *results])
    assert "old thought" not in text
    assert "<|im_start|>assistant\nOne.<|im_end|>\n" in text
    assert "<|im_start|>assistant\nTwo.<|im_end|>\n" in text
    assert (
        "<|im_start|>assistant\n<think>\nnew thought\n</think>\n\n<tool_call>\n<function=add>\n"
        '<parameter=a>\n1\n</parameter>\n<parameter=names>\n["é", "b"]\n</parameter>\n'
        "</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
    ) in text


def test_a_conversation_needs_a_question(template):
    with pytest.raises(UsageError, match="no question"):
        template.render([{"role": "assistant", "content": "Hello"}])


def test_images_are_refused_by_this_text_model(template):
    with pytest.raises(UsageError, match="part of type image_url"):
        template.render([{"role": "user", "content": [{"type": "image_url"}]}])


def test_an_option_that_the_template_does_not_read_is_refused(template):
    with pytest.raises(UsageError, match=r"chat_template_kwargs\.thinking .* enable_thinking\."):
        template.render([USER], {"thinking": True})
    with pytest.raises(UsageError, match="messages"):
        template.render([USER], {"messages": []})


@pytest.mark.parametrize(
    "source",
    [
        "{% if think is defined and think %}x{% endif %}",
        "{% if think is not defined %}{% set think = true %}{% endif %}{% if think %}x{% endif %}",
        "{% set think = think | default(true) %}{{ think }}{% if messages %}{% set y = 1 %}{{ y }}{% endif %}",
    ],
)
def test_options_are_what_a_template_reads_from_outside(source):
    assert ChatTemplate(source).options == {"think"}


def test_a_template_cannot_reach_out_of_its_sandbox():
    with pytest.raises(UsageError, match="refused"):
        ChatTemplate("{{ messages.__class__.__mro__ }}").render([USER])
    with pytest.raises(UsageError, match="refused"):
        ChatTemplate("{{ messages.append(1) }}").render([USER])


def test_templates_are_found_where_older_tools_kept_them(tmp_path):
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    assert ChatTemplate.load(tmp_path).render([USER]) == USER["content"]
    config.write_text("{}")
    with pytest.raises(UnreadableError, match="no chat template"):
        ChatTemplate.load(tmp_path)
    with pytest.raises(UnreadableError, match="not valid Jinja"):
        ChatTemplate("{% if %}")


def test_transformers_renders_the_same(checkpoint, template, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
    theirs.chat_template = (checkpoint / "chat_template.jinja").read_text()
    messages = [{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": "A"}, USER]
    for options in ({}, {"enable_thinking": False}):
        rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        assert template.render(messages, options) == rendered
