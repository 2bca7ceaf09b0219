"""A checked request becomes token ids, a grammar and a thinking budget."""

import asyncio

import pytest

from onebox.engine.api import Grammar, SamplingParams
from onebox.server.media import Media
from onebox.server.prompt import ChatInput, CompletionInput, PromptBuilder
from onebox.text.chat import ChatTemplate

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
    assert build(effort="max").thinking is None
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
