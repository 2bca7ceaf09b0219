"""Responses with `truncation: auto`: the oldest items are left out until the input fits."""

import threading

import pytest

from onebox.server import truncation
from onebox.server.schemas.responses import read_items
from onebox.server.truncation import droppable_units
from tests.server.endpoints.test_responses import QUIET, TOOLS, ask, post, prompt_of
from tests.server.test_errors import refused

AUTO = {"truncation": "auto", **QUIET}


def said(role, text):
    return {"role": role, "content": text}


def call(name):
    return {"type": "function_call", "call_id": name, "name": "ping", "arguments": "{}"}


def result(name):
    return {"type": "function_call_output", "call_id": name, "output": f"result-{name}"}


TURNS = [said(role, f"<{role}-{place}> " + 20 * "x") for place in range(12) for role in ("user", "assistant")]


def test_what_must_stay_and_what_goes_together():
    items = [
        said("system", "s"),
        said("user", "a"),
        {"type": "reasoning", "summary": []},
        call("1"),
        call("2"),
        said("developer", "d"),
        result("1"),
        result("2"),
        said("user", "b"),
        call("3"),
        result("3"),
        call("4"),
        result("4"),
    ]
    assert droppable_units(read_items(items)) == [(1,), (2,), (3, 6), (4, 7), (9, 10)]
    assert droppable_units(read_items(items[:2])) == []
    # A result whose call is in no item has no pair to split.
    assert droppable_units(read_items([result("0"), *items[:2]])) == [(0,)]


def test_as_few_of_the_oldest_as_needed_are_left_out_and_the_answer_says_how_many(scripted, caplog):
    client = scripted("Hi", max_model_len=400)
    items = [*TURNS, said("user", "What now?")]
    refused(post(client, input=items, **QUIET), 400, code="context_length_exceeded", param="input")
    refused(post(client, input=items, truncation="disabled"), 400, code="context_length_exceeded", param="input")
    caplog.set_level("INFO")
    body = post(client, input=items, instructions="Be brief.", **AUTO).json()
    num_dropped = body["truncated_items"]
    assert (body["status"], body["truncation"]) == ("completed", "auto")
    assert 0 < num_dropped < len(TURNS)
    assert f"{num_dropped} items of the input were left out" in caplog.text
    prompt = prompt_of(client)
    left = [item["content"] for item in TURNS[num_dropped:]]
    assert all(text in prompt for text in [*left, "What now?", "Be brief."])
    assert not any(item["content"] in prompt for item in TURNS[:num_dropped])
    assert body["usage"]["input_tokens"] <= 300
    # With one item more it would not have left a quarter of the context for the answer.
    one_more = post(client, input=items[num_dropped - 1 :], instructions="Be brief.", **AUTO).json()
    assert one_more["truncated_items"] == 1
    exact = post(client, input=items[num_dropped:], instructions="Be brief.", **AUTO).json()
    assert exact["truncated_items"] == 0
    assert exact["usage"]["input_tokens"] == body["usage"]["input_tokens"]


def test_a_short_answer_leaves_more_room_for_the_conversation(scripted):
    client = scripted("Hi", max_model_len=400)
    items = [*TURNS, said("user", "What now?")]
    few, many = (post(client, input=items, max_output_tokens=n, **AUTO).json() for n in (10, 9999))
    assert few["truncated_items"] < many["truncated_items"]
    assert few["usage"]["input_tokens"] <= 390
    assert many["max_output_tokens"] == 400 - many["usage"]["input_tokens"] >= 100


def test_calls_and_their_results_are_never_split_and_the_question_stays(scripted):
    client = scripted("Hi", max_model_len=900)
    calls = [item for place in range(20) for item in (call(f"c{place:02}"), result(f"c{place:02}"))]
    items = [said("user", "The one question"), *calls]
    body = post(client, input=items, tools=TOOLS, **AUTO).json()
    prompt = prompt_of(client)
    assert body["truncated_items"] > 0
    assert body["truncated_items"] % 2 == 0
    assert "The one question" in prompt
    results = [f"result-c{place:02}" in prompt for place in range(20)]
    assert results == sorted(results)
    assert prompt.count("result-c") == 20 - body["truncated_items"] // 2


def test_what_does_not_fit_by_itself_is_refused_with_the_reason(scripted):
    client = scripted("Hi", max_model_len=400)
    for items in ([*TURNS, said("user", 500 * "y")], 5000 * "y"):
        message = refused(post(client, input=items, **AUTO), 400, code="context_length_exceeded", param="input")
        assert "the last message of the user" in message
        assert "the context holds 400" in message
    system = post(client, input=[said("system", 500 * "y"), said("user", "Hi")], **AUTO)
    refused(system, 400, code="context_length_exceeded", param="input")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_conversation_stays_whole_and_is_truncated_each_time(openai_client, stream):
    client = openai_client("abc", max_model_len=400)
    first = ask(client, [*TURNS, said("user", "One?")], extra_body=AUTO)
    options = {"previous_response_id": first.id, "extra_body": AUTO, "stream": stream}
    second = ask(client, "Two?", **options)
    second = list(second)[-1].response if stream else second
    assert (second.output_text, second.truncation) == ("abc", "auto")
    # The question, the answer and the new question came to what had to be dropped before.
    assert second.truncated_items >= first.truncated_items
    prompt = prompt_of(client.server)
    assert "One?" in prompt
    assert prompt.index("One?") < prompt.index("Two?")


def test_images_that_are_left_out_are_not_part_of_the_prompt(vision_client):
    from tests.server import test_media as media

    picture = {"type": "input_image", "image_url": media.data_url(media.PICTURE)}
    items = [{"role": "user", "content": [picture]}, *TURNS[1:], said("user", "And now?")]
    body = post(vision_client, input=items, max_output_tokens=1, **AUTO).json()
    assert body["truncated_items"] > 0
    assert "vision_start" not in prompt_of(vision_client)


def test_items_are_sorted_beside_the_event_loop(scripted, monkeypatch):
    """Of tens of thousands it takes a tenth of a second each time, and everybody waits for the loop."""
    threads = []
    for name in ("droppable_units", "_left"):
        work = getattr(truncation, name)
        monkeypatch.setattr(
            truncation, name, lambda *given, work=work: (threads.append(threading.current_thread()), work(*given))[1]
        )
    assert post(scripted("Hi", max_model_len=400), input=[*TURNS, said("user", "What now?")], **AUTO).status_code == 200
    assert len(threads) > 2
    assert threading.current_thread() not in threads
