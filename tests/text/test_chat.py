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


def test_system_messages_at_the_beginning_are_one(template):
    system = {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}
    developer = {"role": "developer", "content": "Be kind."}
    assert template.render([system, USER]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert template.render([system, developer, USER]).startswith(
        "<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>\n"
    )


def test_a_later_system_message_keeps_its_place_as_a_users_turn(template):
    text = template.render([USER, {"role": "assistant", "content": "Hi."}, {"role": "system", "content": "Hurry."}])
    assert text.startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n")
    assert text.endswith("<|im_start|>user\nHurry.<|im_end|>\n<|im_start|>assistant\n<think>\n")


def test_tools_come_first_in_the_system_message(template):
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "größe")]
    lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    with_system, without = (
        template.render([*system, USER], tools=tools) for system in ([{"role": "system", "content": "S"}], [])
    )
    for text, end in ((with_system, "</tool_call>\n\nS<|im_end|>\n"), (without, "</tool_call><|im_end|>\n")):
        head, _, rest = text.partition("<|im_start|>user\n")
        assert head.startswith("<|im_start|>system\n# Tools\n")
        assert f"<tools>{lines}\n</tools>" in head
        assert head.endswith(end)
        assert rest == template.render([USER]).removeprefix("<|im_start|>user\n")


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


def test_arguments_of_earlier_calls_may_be_json_text(template):
    written = {"function": {"name": "add", "arguments": json.dumps(TOOL_CALL["function"]["arguments"])}}
    texts = [template.render([USER, {"role": "assistant", "tool_calls": [call]}]) for call in (TOOL_CALL, written)]
    assert texts[0] == texts[1]
    for arguments in ("{", "[1]", [1]):
        broken = {"role": "assistant", "tool_calls": [TOOL_CALL, {"function": {"name": "f", "arguments": arguments}}]}
        with pytest.raises(UsageError, match=r"messages\.1\.tool_calls\.1\.function\.arguments is not"):
            template.render([USER, broken])


def test_arguments_of_earlier_calls_have_a_bounded_number_of_values(template):
    def conversation(arguments):
        call = {"function": {"name": "add", "arguments": arguments}}
        return [USER, {"role": "assistant", "tool_calls": [call]}]

    with pytest.raises(UsageError, match="arguments has more than 131072 values"):
        template.render(conversation('{"a":[' + "{}," * 200_000 + "{}]}"))
    # Commas and brackets in a text are none.
    assert template.render(conversation(json.dumps({"text": '"\\,[{' * 50_000})))


def test_reasoning_goes_by_both_its_names(template):
    texts = [
        template.render([USER, {"role": "assistant", "content": "A", name: "hm"}])
        for name in ("reasoning", "reasoning_content")
    ]
    assert texts[0] == texts[1]
    assert "<think>\nhm\n</think>\n\nA<|im_end|>" in texts[0]


def test_each_picture_leaves_a_pad_token_at_its_place(template, tokenizer):
    parts = [{"type": "image_url", "image_url": {"url": "u"}}, {"type": "text", "text": "and"}, {"type": "video_url"}]
    text = template.render([{"role": "user", "content": parts}])
    shown = "<|vision_start|><|image_pad|><|vision_end|>and<|vision_start|><|video_pad|><|vision_end|>"
    assert text.startswith(f"<|im_start|>user\n{shown}<|im_end|>\n")
    assert tokenizer.encode(text)[6:10] == (265, 268, 266, ord("a") - ord("!"))
    with pytest.raises(UsageError, match="system message cannot hold a part of type image"):
        template.render([{"role": "system", "content": parts}, USER])
    with pytest.raises(UsageError, match="part of type input_audio"):
        template.render([{"role": "user", "content": [{"type": "input_audio"}]}])


def test_an_option_that_the_template_does_not_read_is_refused(template):
    with pytest.raises(UsageError, match=r"chat_template_kwargs\.thinking .* enable_thinking\."):
        template.render([USER], {"thinking": True})
    with pytest.raises(UsageError, match="messages"):
        template.render([USER], {"messages": []})


def test_a_switch_of_the_template_takes_true_and_false_alone(template):
    assert template.switches == {"enable_thinking"}
    assert template.check_options({"enable_thinking": None}) == {}
    for value in ("false", 0, 1, [], "x" * 1000):
        with pytest.raises(UsageError, match=r"chat_template_kwargs\.enable_thinking is true or false"):
            template.check_options({"enable_thinking": value})
    source = "{{ a or 'x' }}{% if not b %}{% endif %}{{ 1 if c is false else 2 }}{% if d == 'x' %}{% endif %}"
    assert ChatTemplate(source).switches == {"b", "c"}


@pytest.mark.parametrize(
    "source",
    [
        "{% if think is defined and think %}x{% endif %}",
        "{% if think is not defined %}{% set think = true %}{% endif %}{% if think %}x{% endif %}",
        "{% set think = think | default(true) %}{{ think }}{% if messages %}{% set y = 1 %}{{ y }}{% endif %}",
        "{% macro show(x) %}{% if x is defined %}{{ x }}{% endif %}{% endmacro %}"
        "{% for m in messages %}{% if m %}{% set x = m %}{% endif %}{{ show(x) }}{% endfor %}{{ think }}",
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
    calling = {"role": "assistant", "content": "A", "tool_calls": [TOOL_CALL]}
    messages = [{"role": "system", "content": "S"}, USER, calling, {"role": "tool", "content": "3"}]
    tools = [{"type": "function", "function": {"name": "add", "description": "größer"}}]
    for options in ({}, {"enable_thinking": False}):
        rendered = theirs.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **options
        )
        assert template.render(messages, options, tools) == rendered
