"""A checked request becomes token ids, a grammar and a thinking budget."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.engine.api import ContextTooLongError, Grammar, SamplingParams
from onebox.server.media import Media
from onebox.server.prompt import ChatInput, CompletionInput, PromptBuilder
from onebox.text.chat import ChatTemplate
from tests.engine.scripted import ScriptedRunner
from tests.server.conftest import Client
from tests.text.hostile import CONVERSATIONS, harmless

QUESTION = [{"role": "user", "content": "Hi"}]
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def build(checkpoint, tokenizer):
    def make(template=None, options=None, **fields):
        template = template or ChatTemplate.load(checkpoint)
        builder = PromptBuilder(tokenizer, template, options or {}, Media.text_only(), 400)
        return asyncio.run(builder.of_chat(ChatInput(QUESTION, SamplingParams(), **fields)))

    return make


@pytest.mark.parametrize(
    ("options", "fields", "thinks"),
    [
        ({}, {}, True),
        ({}, {"thinks_by_default": False}, False),
        ({"enable_thinking": True}, {"thinks_by_default": False}, True),
        ({"enable_thinking": False}, {}, False),
        ({"enable_thinking": False}, {"effort": "low"}, True),
        ({"enable_thinking": False}, {"thinking_budget": 5}, True),
        ({"enable_thinking": True}, {"effort": "none"}, False),
        ({"enable_thinking": True}, {"thinking_budget": 0}, False),
        ({}, {"effort": "low", "enable_thinking": False}, False),
        ({}, {"enable_thinking": False, "template_options": {"enable_thinking": True}}, True),
    ],
)
def test_the_more_specific_setting_decides_whether_the_model_thinks(build, tokenizer, options, fields, thinks):
    prompt = build(options=options, **fields)
    assert tokenizer.decode(prompt.token_ids).endswith("<think>\n") == thinks
    assert prompt.parser().in_reasoning == thinks


def test_a_template_without_the_option_ignores_a_dialects_thinking_switch(build, tokenizer):
    for fields in ({"enable_thinking": True}, {"thinks_by_default": False}, {"effort": "low"}):
        assert tokenizer.decode(build(ChatTemplate(PLAIN_TEMPLATE), **fields).token_ids) == "Hi"


def test_a_budget_in_tokens_overrides_the_efforts(build):
    assert build(effort="low").thinking.num_tokens == 2048
    assert build(effort="low", thinking_budget=7).thinking.num_tokens == 7
    assert build(effort="max").thinking.num_tokens is None
    assert build(effort="none").thinking is None


def test_a_grammar_applies_after_the_reasoning(build):
    grammar = Grammar.choice(["yes", "no"])
    thinking = build(grammar=grammar, thinking_budget=5)
    assert thinking.sampling.grammar != grammar
    assert thinking.thinking.grammar == grammar
    assert build(grammar=grammar, enable_thinking=False).sampling.grammar == grammar


def test_texts_and_token_ids_of_a_completion_are_prompts_of_their_own(checkpoint, tokenizer):
    builder = PromptBuilder(tokenizer, ChatTemplate.load(checkpoint), {}, Media.text_only(), 400)
    completion = CompletionInput(["Hi", [5, 6]], SamplingParams(), ("END",), priority=3)
    first, second = asyncio.run(builder.of_completion(completion))
    assert (first.token_ids, second.token_ids) == (tokenizer.encode("Hi"), (5, 6))
    assert {(prompt.stops, prompt.priority, prompt.parser().in_reasoning) for prompt in (first, second)} == {
        (("END",), 3, False)
    }


@settings(max_examples=100)
@given(CONVERSATIONS, st.sampled_from(["/v1/chat/completions", "/tokenize"]))
def test_a_hostile_conversation_is_refused_or_forges_nothing(fuzzed, conversation, path):
    """Through the API: as many turns as messages make, and no other control token than the template's own."""
    messages, tools = conversation
    # Other names of functions are refused.
    for place, tool in enumerate(tools):
        tool["function"]["name"] = f"f{place}"
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"] = {"name": "f", "arguments": json.dumps(call["function"]["arguments"])}
    answers = []
    for is_hostile in (True, False):
        sent = (
            {"messages": messages, "tools": tools} if is_hostile else harmless({"messages": messages, "tools": tools})
        )
        if path == "/tokenize":
            response = fuzzed.request("POST", path, json_body=sent)
            token_ids = response.json().get("tokens")
        else:
            body = {**sent, "max_tokens": 1, "return_token_ids": True}
            response = fuzzed.request("POST", path, json_body=body)
            token_ids = response.json().get("prompt_token_ids")
        assert response.status_code in (200, 400), response.text
        if token_ids is None:
            # A text part of a role that has none, for instance.
            assert response.status_code == 400
            return
        answers.append([token_id for token_id in token_ids if token_id >= 256])
    hostile, plain = answers
    # The template drops a reasoning that it finds between marks, so that less of the answer may be left.
    starts = fuzzed.service.tokenizer.message_token_ids[0]
    assert hostile.count(starts) == plain.count(starts)
    assert hostile == plain


@pytest.fixture(scope="module")
def fuzzed(make_service, tokenizer):
    service = make_service(ScriptedRunner(tokenizer.encode("ok<|im_end|>")), max_model_len=4000, num_pages=300)
    with service.engine:
        yield Client(service)


def test_more_messages_than_tokens_are_refused_before_they_are_rendered(checkpoint, tokenizer):
    builder = PromptBuilder(tokenizer, None, {}, Media.text_only(), 400)
    with pytest.raises(ContextTooLongError, match="401 messages and the context holds 400 tokens"):
        asyncio.run(builder.of_chat(ChatInput(QUESTION * 401, SamplingParams())))


def test_a_prompt_far_beyond_the_context_is_refused_with_both_numbers(checkpoint, tokenizer):
    builder = PromptBuilder(tokenizer, ChatTemplate.load(checkpoint), {}, Media.text_only(), 400)
    long = "word " * 20_000
    asked = (
        builder.of_chat(ChatInput([{"role": "user", "content": long}], SamplingParams())),
        builder.of_completion(CompletionInput([long], SamplingParams())),
        builder.ids_of_text(long),
    )
    for prompt in asked:
        with pytest.raises(ContextTooLongError, match="more than 66336 tokens > 400 maximum"):
            asyncio.run(prompt)
