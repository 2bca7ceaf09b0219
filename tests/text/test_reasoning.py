"""The rendered prompt tells whether the answer starts with reasoning."""

from onebox.text.reasoning import begins_in_reasoning

USER = {"role": "user", "content": "What does <think> mean? <think>"}


def test_the_prompt_tells_where_the_answer_begins(template):
    assert begins_in_reasoning(template.render([USER]))
    assert not begins_in_reasoning(template.render([USER], {"enable_thinking": False}))
