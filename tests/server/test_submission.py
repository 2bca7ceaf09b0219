"""However a request ends, in every dialect, streamed or whole: nothing of it stays in the engine."""

import asyncio
import json
import threading
from concurrent.futures import Future

import pytest

from onebox.engine.api import QueueFullError, Request, SamplingParams
from onebox.server import reply
from onebox.server.answer import Answer
from onebox.server.endpoints import messages, openai_reply, response_reply
from onebox.server.errors import GenerationError
from onebox.server.prompt import Prompt
from onebox.server.submission import Submission
from tests.engine.scripted import ScriptedRunner
from tests.server.conftest import wait_until

MESSAGES = [{"role": "user", "content": "Hi"}]
CONTEXT = 100_000
DIALECTS = {
    "/v1/chat/completions": (openai_reply, "OpenAIReply", {"messages": MESSAGES, "n": 2}),
    "/v1/completions": (openai_reply, "OpenAIReply", {"prompt": ["Hi", "Ho"], "max_tokens": CONTEXT - 10}),
    "/v1/responses": (response_reply, "ResponseReply", {"input": "Hi"}),
    "/v1/messages": (messages, "MessageReply", {"model": "tiny", "messages": MESSAGES, "max_tokens": CONTEXT}),
}


class FaultError(Exception):
    pass


def fail(*_, **__):
    raise FaultError("an injected fault")


def fail_deep(*_, **__):
    raise RecursionError("an injected fault")


@pytest.fixture
def endless(scripted):
    """A client of an engine whose answers go on to the end of a long context."""
    client = scripted("x", max_model_len=CONTEXT, num_pages=4 * CONTEXT // 16)
    client.runner.script = client.service.tokenizer.encode("x" * 50)
    return client


def is_empty(engine):
    """Nothing is open, and what was open did not run to its end."""
    wait_until(lambda: not engine._open)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    return stats.totals.completion_tokens < CONTEXT - 1000


def form_of(path):
    return getattr(*DIALECTS[path][:2])


def post(client, path, stream, *, send=None, receive=None, **fields):
    """The application's own coroutine for one request."""
    body = json.dumps({**DIALECTS[path][2], "stream": stream, **fields}).encode()
    sent = []

    async def receive_body():
        if not sent:
            sent.append(True)
            return {"type": "http.request", "body": body}
        return await (receive or asyncio.Event().wait)()

    async def drop(_):
        pass

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "root_path": ""}
    scope |= {"headers": [(b"content-type", b"application/json")], "asgi": {"spec_version": "2.3"}}
    return client.app(scope, receive_body, send or drop)


def run_out(coroutine):
    """Runs it to its end, which may be an error."""

    async def run():
        async with asyncio.timeout(60):
            await coroutine

    try:
        asyncio.run(run())
    except Exception as error:
        return error
    return None


every_dialect = pytest.mark.parametrize("path", DIALECTS)
streamed_or_whole = pytest.mark.parametrize("stream", [False, True])


@every_dialect
@streamed_or_whole
@pytest.mark.parametrize("fault", [fail, fail_deep])
def test_an_error_while_the_reply_is_made(endless, monkeypatch, path, stream, fault):
    monkeypatch.setattr(form_of(path), "__init__", fault)
    assert isinstance(run_out(post(endless, path, stream)), FaultError | RecursionError)
    assert endless.requests
    assert is_empty(endless.service.engine)


@every_dialect
@pytest.mark.parametrize("part", ["begin", "chunk"])
def test_an_error_while_an_event_is_made(endless, monkeypatch, path, part):
    monkeypatch.setattr(form_of(path), part, fail)
    run_out(post(endless, path, stream=True))
    assert endless.requests
    assert is_empty(endless.service.engine)


@every_dialect
@streamed_or_whole
def test_an_error_while_an_answer_is_read(endless, monkeypatch, path, stream):
    monkeypatch.setattr(Answer, "_take", fail)
    run_out(post(endless, path, stream))
    assert is_empty(endless.service.engine)


@every_dialect
def test_an_event_that_is_no_json(endless, monkeypatch, path):
    monkeypatch.setattr(DIALECTS[path][0], "sse_event", fail)
    run_out(post(endless, path, stream=True))
    assert is_empty(endless.service.engine)


@every_dialect
def test_a_response_that_cannot_be_begun(endless, monkeypatch, path):
    monkeypatch.setattr(reply, "EventStream", fail)
    assert isinstance(run_out(post(endless, path, stream=True)), FaultError)
    assert is_empty(endless.service.engine)


@every_dialect
@pytest.mark.parametrize("error", [OSError("broken pipe"), FaultError("a fault")])
def test_a_first_byte_that_cannot_be_sent(endless, path, error):
    async def send(_):
        raise error

    run_out(post(endless, path, stream=True, send=send))
    assert is_empty(endless.service.engine)


@every_dialect
@streamed_or_whole
def test_a_client_that_is_gone_before_the_answer_begins(endless, path, stream):
    """Then the stream's generator may never be started."""

    async def gone():
        while not endless.requests:
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    endless.runner.gate.clear()
    run_out(post(endless, path, stream, receive=gone))
    endless.runner.gate.set()
    assert is_empty(endless.service.engine)


@every_dialect
@streamed_or_whole
def test_a_client_that_leaves_while_the_engine_wakes_is_never_submitted(endless, path, stream):
    """Else those who left would hold the places when it is awake, and who stayed gets 429."""
    awake, waits = Future(), threading.Event()
    endless.service.engine.awake = lambda: (waits.set(), awake)[1]

    async def leave():
        while not waits.is_set():
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    assert run_out(post(endless, path, stream, receive=leave)) is None
    assert awake.cancelled()
    assert not endless.requests


@every_dialect
@streamed_or_whole
def test_a_request_that_is_cancelled_while_it_waits_for_tokens(endless, path, stream):
    endless.runner.gate.clear()

    async def cancel():
        task = asyncio.ensure_future(post(endless, path, stream))
        while not endless.service.engine._open:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task], timeout=60)

    asyncio.run(cancel())
    endless.runner.gate.set()
    assert is_empty(endless.service.engine)


@every_dialect
@streamed_or_whole
def test_a_request_that_is_cancelled_while_it_is_submitted(endless, path, stream):
    """The thread that submits cannot be cancelled: it goes on, and what it submits is aborted."""
    engine, may_submit, submitting = endless.service.engine, threading.Event(), threading.Event()
    submit_copies = engine.submit_copies

    def submit_late(request, count):
        submitting.set()
        may_submit.wait()
        return submit_copies(request, count)

    engine.submit_copies = submit_late

    async def cancel():
        task = asyncio.ensure_future(post(endless, path, stream))
        while not submitting.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task], timeout=60)
        assert task.done(), "it waits for the thread"

    asyncio.run(cancel())
    may_submit.set()
    wait_until(lambda: endless.requests)
    assert is_empty(engine)


def test_a_second_prompt_that_is_refused_takes_the_first_with_it(endless):
    engine, submit_copies, asked = endless.service.engine, endless.service.engine.submit_copies, []

    def submit_once(request, count):
        asked.append(request)
        if len(asked) > 1:
            raise QueueFullError("The queue is full.")
        return submit_copies(request, count)

    engine.submit_copies = submit_once
    run_out(post(endless, "/v1/completions", stream=False))
    assert len(asked) == 2
    assert is_empty(engine)


def test_one_of_several_answers_that_fails_ends_the_others(endless, monkeypatch):
    seen, take = [], Answer._take

    def fail_second(answer, event):
        seen.append(answer)
        return take(answer, event) if answer is seen[0] else fail()

    monkeypatch.setattr(Answer, "_take", fail_second)
    run_out(post(endless, "/v1/chat/completions", stream=False))
    assert is_empty(endless.service.engine)


def test_the_rest_of_an_answer_that_is_submitted_after_the_client_left_is_aborted(endless):
    """An answer whose thinking budget is used up is continued by a second request."""
    engine, may_submit, submitting = endless.service.engine, threading.Event(), threading.Event()
    submit = engine.submit

    def submit_late(request):
        submitting.set()
        may_submit.wait()
        return submit(request)

    async def leave():
        while not submitting.is_set():
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    engine.submit = submit_late
    run_out(post(endless, "/v1/chat/completions", stream=False, receive=leave, thinking_budget=20, n=1))
    may_submit.set()
    wait_until(lambda: len(endless.requests) == 2)
    assert is_empty(engine)


def test_answers_that_nobody_reads_are_aborted(endless):
    """A block that is left without reading, as when a response is dropped."""

    async def drop():
        async with endless.service.submit([Prompt((1,), SamplingParams())], "x", 3) as answers:
            assert len(answers.answers) == 3

    asyncio.run(drop())
    assert is_empty(endless.service.engine)


def test_nothing_can_be_submitted_through_a_closed_submission(endless):
    submission = Submission(endless.service.engine)
    submission.close()
    submission.close()
    with pytest.raises(GenerationError, match="client left"):
        asyncio.run(submission.submit_copies(Request("x", (1,)), 1))
    assert not endless.requests


# Failures after a stream has begun.


class FailingRunner(ScriptedRunner):
    """Cannot compute an answer's fifth token."""

    def _rows(self, rows):
        result = super()._rows(rows)
        return ArithmeticError("a scripted failure") if self._drawn[rows.request_id] == 5 else result


@every_dialect
@pytest.mark.parametrize("way", ["engine", "server"])
def test_a_failure_in_mid_stream_ends_it_with_an_error_and_without_a_finish(endless, monkeypatch, path, way):
    if way == "engine":
        endless.runner.__class__ = FailingRunner
    else:
        seen, chunk = [], form_of(path).chunk

        def fail_fifth(*given):
            seen.append(given)
            return chunk(*given) if len(seen) < 5 else fail()

        monkeypatch.setattr(form_of(path), "chunk", fail_fifth)
    body = {**DIALECTS[path][2], "stream": True}
    response = endless.request("POST", path, json_body=body)
    assert response.status_code == 200
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    told = [json.loads(line) for line in lines if line != "[DONE]"]
    if path == "/v1/messages":
        assert told[-1]["type"] == "error"
        assert told[-1]["error"].keys() == {"type", "message"}
        assert all(event["type"] not in ("message_delta", "message_stop") for event in told)
    elif path == "/v1/responses":
        assert (told[-1]["type"], told[-1]["response"]["status"]) == ("response.failed", "failed")
        assert told[-1]["response"]["error"]["code"] == "server_error"
        assert all(event["type"] != "response.completed" for event in told)
    else:
        assert lines[-1] == "[DONE]"
        assert told[-1]["error"].keys() == {"message", "type", "param", "code"}
        assert all(choice["finish_reason"] is None for event in told[:-1] for choice in event["choices"])
    assert is_empty(endless.service.engine)
