"""Reasoning: turned off, budgeted and counted; grammars bind what follows it."""

import asyncio
import json
from functools import partial

import httpx
import pytest

from onebox.engine.api import QueueFullError, SamplingParams
from onebox.server.errors import GenerationError
from onebox.server.prompt import Prompt
from onebox.server.thinking import ThinkingBudget
from onebox.text.parser import AnswerParser
from tests.engine.scripted import ScriptedRunner
from tests.server.conftest import events, wait_until

LONG = "thinking " * 20
BUDGETS = ["thinking_budget", "max_reasoning_tokens", "thinking_token_budget"]
CLOSING = "Considering the limited time by the user"


def message_of(response):
    return response.json()["choices"][0]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"thinking_budget": 0},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking_budget": 0}},
    ],
)
def test_thinking_can_be_turned_off_in_every_way_that_clients_know(scripted, fields):
    client = scripted("Yes.")
    body = client.chat(**fields, return_token_ids=True).json()
    assert client.service.tokenizer.decode(body["prompt_token_ids"]).endswith("<think>\n\n</think>\n\n")
    assert body["choices"][0]["message"]["content"] == "Yes."
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


ON = [
    {"enable_thinking": True},
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"reasoning_effort": "low"},
    {"thinking_budget": 5},
]
OFF = [
    {"enable_thinking": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning_effort": "none"},
    {"max_reasoning_tokens": 0},
    {"chat_template_kwargs": {"thinking_budget": 0}},
]


# Pairs of different fields. Two budgets that differ are refused by themselves.
PAIRS = [(on, off) for on in ON for off in OFF if on.keys() != off.keys() and "budget" not in f"{on}" + f"{off}"]
PAIRS += [(on, off) for on in ON[:3] for off in OFF[3:]] + [(ON[3], off) for off in OFF[:3]]


@pytest.mark.parametrize(("on", "off"), PAIRS)
def test_a_request_that_turns_thinking_on_and_off_is_refused_with_both_fields(scripted, on, off):
    both = {**on.get("chat_template_kwargs", {}), **off.get("chat_template_kwargs", {})}
    fields = {**on, **off, **({"chat_template_kwargs": both} if both else {})}
    names = [
        f"{name}.{next(iter(value))}" if isinstance(value, dict) else name
        for name, value in (*on.items(), *off.items())
    ]
    response = scripted("Yes.").chat(**fields)
    assert response.status_code == 400
    assert f"turned on by {names[0]} and off by {names[1]}" in response.json()["error"]["message"]


@pytest.mark.parametrize("value", ["false", "true", 0, 1, [], {}, 0.0])
def test_a_switch_of_the_template_is_true_or_false(scripted, value):
    for fields in ({"chat_template_kwargs": {"enable_thinking": value}}, {"enable_thinking": value}):
        response = scripted("Yes.").chat(**fields)
        assert response.status_code == 400
        assert "enable_thinking" in response.json()["error"]["message"]
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"enable_thinking": value}}
    response = scripted("Yes.").request("POST", "/tokenize", json_body=body)
    assert response.status_code == 400
    assert "chat_template_kwargs.enable_thinking is true or false" in response.json()["error"]["message"]


def test_null_leaves_thinking_as_it_is(scripted):
    client = scripted("Yes.")
    body = client.chat(chat_template_kwargs={"enable_thinking": None}, enable_thinking=False).json()
    assert body["choices"][0]["message"]["content"] == "Yes."


def test_a_request_goes_before_the_servers_default(scripted):
    client = scripted("Yes.")
    object.__setattr__(client.service, "template_options", {"enable_thinking": False})
    assert message_of(client.chat())["content"] == "Yes."
    assert message_of(client.chat(reasoning_effort="high"))["reasoning"] == "Yes."
    assert message_of(client.chat(enable_thinking=True))["reasoning"] == "Yes."


@pytest.fixture
def thinker(scripted):
    """Thinks for 180 tokens; asked to go on after a closed reasoning, it begins its text anew: that is the answer."""
    return scripted(LONG, max_model_len=1200)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", BUDGETS)
def test_reasoning_beyond_its_budget_is_closed_and_the_answer_goes_on(thinker, field, stream):
    response = thinker.chat(**{field: 30}, stream=stream, return_token_ids=True, max_tokens=400)
    if stream:
        chunks = events(response)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        reasoning = "".join(delta.get("reasoning", "") for delta in deltas)
        content = "".join(delta.get("content", "") for delta in deltas)
        token_ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        (choice,) = response.json()["choices"]
        reasoning, content = choice["message"]["reasoning"], choice["message"]["content"]
        token_ids, reason = choice["token_ids"], choice["finish_reason"]
        details = response.json()["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == 30
        assert response.json()["usage"]["completion_tokens"] == len(token_ids) + 1
    assert reasoning.startswith(LONG[:30] + "\n\n" + CLOSING)
    assert (content, reason) == (LONG, "stop")
    first, second = thinker.requests
    assert second.prompt == (*first.prompt, *token_ids[: len(second.prompt) - len(first.prompt)])
    assert thinker.service.tokenizer.decode(second.prompt).endswith("directly now.\n</think>\n\n")
    assert len(second.prompt) + second.sampling.max_tokens == len(first.prompt) + 400


def test_a_budget_in_the_template_options_counts_too(thinker):
    body = thinker.chat(chat_template_kwargs={"thinking_budget": 30}).json()
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 30


def test_an_effort_is_a_budget(scripted):
    client = scripted("long thoughts " * 60, max_model_len=2000)
    body = client.chat(reasoning_effort="minimal").json()
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 512
    body = client.chat(reasoning_effort="minimal", thinking_budget=100).json()
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 100
    body = client.chat(reasoning_effort="max").json()
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 840


def test_a_budget_waits_for_the_end_of_a_character(scripted):
    message = message_of(scripted("世界" * 30, max_model_len=1200).chat(thinking_budget=4))
    assert message["reasoning"].startswith("世界\n\n" + CLOSING)


def test_a_reasoning_within_its_budget_is_left_alone(scripted):
    client = scripted("Short.\n</think>\n\nDone.")
    message = message_of(client.chat(thinking_budget=100))
    assert (message["reasoning"], message["content"], len(client.requests)) == ("Short.", "Done.", 1)


def test_a_budget_without_room_for_an_answer_ends_by_length(thinker):
    (choice,) = thinker.chat(thinking_budget=30, max_tokens=100).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert choice["message"]["reasoning"] == LONG[:100]


def test_a_stop_string_is_not_found_in_the_closing_words(thinker):
    message = message_of(thinker.chat(thinking_budget=30, stop=["limited"]))
    assert CLOSING in message["reasoning"]
    assert message["content"] == LONG


def test_n_answers_keep_their_budgets_apart(thinker):
    body = thinker.chat(thinking_budget=30, n=2, seed=5).json()
    assert sorted(sampling.seed for sampling in thinker.sampling) == [5, 5, 6, 6]
    assert [choice["message"]["content"] for choice in body["choices"]] == [LONG, LONG]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 60


# The second request, where the queue is full.


@pytest.fixture
def full_queue(thinker, monkeypatch):
    """Makes the engine refuse the next `count` second requests, and the server wait `timeout_s` for a place."""

    def fill(count, timeout_s):
        engine, refusals = thinker.service.engine, iter(range(count))
        submit = engine.submit

        def submit_or_refuse(request):
            if next(refusals, None) is not None:
                raise QueueFullError("The queue is full.")
            return submit(request)

        monkeypatch.setattr(engine, "submit", submit_or_refuse)
        object.__setattr__(thinker.service, "resubmit_timeout_s", timeout_s)

    return fill


def test_an_answer_waits_for_a_place_in_the_queue(thinker, full_queue):
    full_queue(2, timeout_s=60)
    assert message_of(thinker.chat(thinking_budget=30))["content"] == LONG


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_with_a_sentence_where_the_queue_stays_full(thinker, full_queue, stream):
    full_queue(10**9, timeout_s=0.02)
    response = thinker.chat(thinking_budget=30, stream=stream)
    error = events(response)[-1]["error"] if stream else response.json()["error"]
    assert "the queue stayed full for 0.02 seconds, so the answer could not be continued" in error["message"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert response.status_code == (200 if stream else 429)
    assert len(thinker.requests) == 1


def test_nothing_is_submitted_for_a_client_that_left(make_service, tokenizer):
    service = make_service(ScriptedRunner(tokenizer.encode(LONG)))
    sampling = SamplingParams(max_tokens=300)
    parser = partial(AnswerParser, in_reasoning=True)
    prompt = Prompt((1,), sampling, parser=parser, thinking=ThinkingBudget(5, None))

    async def leave():
        async with service.submit([prompt], "x") as answers:
            pass
        service.engine.submit = None
        await answers.whole()

    with service.engine, pytest.raises(GenerationError):
        asyncio.run(leave())


SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["size", "ok"],
    "additionalProperties": False,
}
FORMATS = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
]


@pytest.mark.parametrize(("fields", "thinking_budget"), [(FORMATS[0], 20), *((fields, 0) for fields in FORMATS)])
def test_a_random_model_keeps_to_the_schema_after_its_reasoning(tiny, fields, thinking_budget):
    body = tiny.chat(**fields, thinking_budget=thinking_budget, max_tokens=320, seed=3).json()
    (choice,) = body["choices"]
    document = json.loads(choice["message"]["content"])
    assert document.keys() == {"size", "ok"}
    assert 0 <= document["size"] <= 99
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] <= thinking_budget + 3


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "yes|no"},
        {"guided_grammar": 'start: "yes" | "no"'},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"regex": "yes|no"}},
        {"structured_outputs": {"grammar": 'start: "yes" | "no"'}},
    ],
)
def test_a_random_model_keeps_to_what_vllms_fields_ask_for(tiny, fields):
    assert message_of(tiny.chat(**fields, enable_thinking=False, max_tokens=9, seed=3))["content"] in ("yes", "no")
    assert tiny.complete(**fields, max_tokens=9, seed=3).json()["choices"][0]["text"] in ("yes", "no")


def test_json_object_and_tools_leave_the_choice_to_the_model(scripted):
    tool = {"type": "function", "function": {"name": "ping"}}
    options = {"tools": [tool], "response_format": {"type": "json_object"}}
    called = scripted("Hm\n</think>\n\n<tool_call>\n<function=ping>\n</function>\n</tool_call>", max_model_len=900)
    assert message_of(called.chat(**options))["tool_calls"][0]["function"]["name"] == "ping"
    said = scripted('Hm\n</think>\n\n{"a": 1}', max_model_len=900)
    assert message_of(said.chat(**options))["content"] == '{"a": 1}'


# Ended by the client.


def hold_after(runner, num_steps):
    """No further step until the gate is set."""
    run = runner.run

    def held(plan):
        if len(runner.plans) == num_steps:
            runner.gate.clear()
        return run(plan)

    runner.run = held


def stream_until_asked(client, url, path, body, count, request_id=None):
    """Streams an answer, ends its thinking when `count` deltas of it have come; (what control said, all events)."""
    events, said = [], None
    hold_after(client.runner, 20)
    headers = {"x-request-id": request_id} if request_id else {}
    with httpx.stream("POST", f"{url}{path}", json={**body, "stream": True}, headers=headers, timeout=60) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            events.append(json.loads(line[6:]))
            if said is None and sum(_is_thought(event) for event in events) >= count:
                answer_id = request_id or _id_of(events)
                said = httpx.post(
                    f"{url}/v1/chat/completions/control", json={"id": answer_id, "action": "reasoning_end"}
                )
                client.runner.gate.set()
    return said, events


def _id_of(events):
    first = events[0]
    return first.get("id") or first.get("response", {}).get("id") or first["message"]["id"]


def _is_thought(event):
    if "choices" in event:
        return bool(event["choices"] and event["choices"][0]["delta"].get("reasoning"))
    return event["type"] in ("response.reasoning_text.delta", "content_block_delta")


@pytest.mark.parametrize("by_request_id", [False, True])
def test_thinking_that_is_ended_is_closed_exactly_as_by_a_budget(served, by_request_id):
    client, url = served(LONG * 40, max_model_len=3000)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 900, "temperature": 0}
    said, events = stream_until_asked(client, url, "/v1/chat/completions", body, 3, "mine" if by_request_id else None)
    assert said.json()["num_ended"] == 1
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    reasoning = "".join(delta.get("reasoning", "") for delta in deltas)
    content = "".join(delta.get("content", "") for delta in deltas)
    assert "Considering the limited time" in reasoning
    num_thought = len(reasoning.split("\n\nConsidering")[0])
    # The tokenizer has a token a character.
    budgeted = client.chat(max_tokens=900, temperature=0, thinking_budget=num_thought).json()["choices"][0]["message"]
    assert (budgeted["reasoning"], budgeted["content"]) == (reasoning, content)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 900}),
        (
            "/v1/messages",
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": "Hi"}],
                "max_tokens": 2000,
                "thinking": {"type": "enabled", "budget_tokens": 1500},
            },
        ),
    ],
)
def test_every_dialects_thinking_can_be_ended(served, path, body):
    client, url = served(LONG * 40, max_model_len=3000)
    said, events = stream_until_asked(client, url, path, body, 2)
    assert (said.status_code, said.json()["num_ended"]) == (200, 1)
    assert "Considering the limited time" in "".join(json.dumps(event) for event in events)


def test_only_what_thinks_can_be_ended_and_only_what_is_computed_is_found(served):
    client, url = served("Yes.\n</think>\n\n" + "x" * 900)
    control = f"{url}/v1/chat/completions/control"
    body = {"messages": [{"role": "user", "content": "Hi"}], "enable_thinking": False, "stream": True, "max_tokens": 50}
    hold_after(client.runner, 20)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        first = json.loads(next(line for line in lines if line.startswith("data: {"))[6:])
        said = httpx.post(control, json={"id": first["id"], "action": "reasoning_end"})
        client.runner.gate.set()
        list(lines)
    assert (said.status_code, said.json()["num_ended"]) == (200, 0)
    over = {"id": first["id"], "action": "reasoning_end"}
    wait_until(lambda: httpx.post(control, json=over).status_code == 404)
    assert httpx.post(control, json={"id": "chatcmpl-none", "action": "reasoning_end"}).status_code == 404
    assert httpx.post(control, json={"id": "x", "action": "other"}).status_code == 400
