"""`onebox chat` against the real server over real sockets, and against others that behave badly."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from onebox.server.keys import ApiKey
from onebox.server.run import bind
from onebox.server.settings import ServerSettings
from tests.server.conftest import Client, listening, make_service, scripted, wait_until

__all__ = ["make_service", "scripted"]

LIMIT_S = 120
"""Only so that a defect does not wait for ever."""
ANSWER = "Let me see.\n</think>\n\nIt is 42."


class Typed(io.StringIO):
    """Standard input that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def talk(run_cli, monkeypatch):
    """Runs the command with these lines typed in; the output is without the prompts."""

    def run(url, *lines, options=()):
        monkeypatch.setattr(sys, "stdin", Typed("".join(f"{line}\n" for line in lines)))
        monkeypatch.setattr("onebox.cli.chat.is_terminal", lambda _: True)
        result = run_cli("chat", "--url", url, *options)
        return result._replace(out=re.sub(r"(?m)^(> |\. )+", "", result.out).strip())

    return run


@pytest.fixture
def ask(run_cli, monkeypatch):
    """Runs the command as a script does: words on the command line, a text or bytes on standard input."""

    def run(url, *words, piped=""):
        data = piped if isinstance(piped, bytes) else piped.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        return run_cli("chat", "--url", url, *words)

    return run


@contextmanager
def answering(*chunks, status=200, model="other"):
    """A server of somebody else's make that streams these events to every question; gives its URL and the bodies."""
    bodies = []

    async def models(request):
        return JSONResponse({"data": [{"id": model}, {"id": "second"}]})

    async def chat(request):
        bodies.append(await request.json())
        events = [chunk if isinstance(chunk, str) else f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return PlainTextResponse("".join(events), status)

    routes = [Route("/v1/models", models), Route("/v1/chat/completions", chat, methods=["POST"])]
    with listening(Starlette(routes=routes)) as url:
        yield url, bodies


def said(delta, **fields):
    return {"choices": [{"index": 0, "delta": delta}], **fields}


def test_an_answer_comes_after_its_thinking_and_with_its_figures(scripted, talk):
    client = scripted(ANSWER)
    with listening(client.app) as url:
        result = talk(url.removeprefix("http://"), "What is 6 × 7?")
    assert (result.code, result.err) == (0, "")
    first, thinking, answer, figures = result.out.splitlines()
    assert first == f"tiny at {url}. /help shows the commands."
    assert (thinking, answer) == ("Let me see.", "It is 42.")
    made = len(client.service.tokenizer.encode(ANSWER)) + 1
    assert re.fullmatch(rf"\({made} tokens, [\d.]+ tokens/s, first after [\d.]+ s\)", figures)


def test_the_server_is_told_the_whole_conversation_and_the_commands_change_it(scripted, talk):
    client = scripted(ANSWER, max_model_len=2000)
    with listening(client.app) as url:
        lines = ("One?", "/system Be short.", "/think off", "", "Two?", "/reset", "/system", "/think on", "Three?")
        result = talk(f"{url}/v1/", *lines)
    assert result.err == ""
    prompts = [client.service.tokenizer.decode(request.prompt) for request in client.requests]
    assert [[word in prompt for word in ("One?", "42", "Two?", "short.", "Three?")] for prompt in prompts] == [
        [True, False, False, False, False],
        [True, True, True, True, False],
        [False, False, False, False, True],
    ]
    assert [prompt.rstrip().endswith("<think>") for prompt in prompts] == [True, False, True]


def test_a_field_that_other_servers_may_not_know_is_sent_only_when_asked_for(talk):
    with answering(said({"content": "Yes."})) as (url, bodies):
        talk(url, "Hi", "/think off", "And?", options=("--model", "second"))
    assert bodies[0].keys() == {"model", "messages", "stream", "stream_options"}
    assert bodies[1]["chat_template_kwargs"] == {"enable_thinking": False}
    assert [body["model"] for body in bodies] == ["second", "second"]


def test_tool_calls_are_shown_and_kept(talk):
    def call(index, **function):
        return {"tool_calls": [{"index": index, "id": f"c{index}", "function": function}]}

    chunks = [
        said({"role": "assistant", "content": None}),
        said({"reasoning": "Hm."}),
        said(call(0, name="look", arguments="")),
        said(call(0, arguments='{"at": ')),
        said(call(0, arguments='"it"}')),
        said(call(1, name="ping", arguments="{}")),
    ]
    with answering(*chunks, ": a comment\n\n", "data: [DONE]\n\n") as (url, bodies):
        result = talk(url, "Hi", "Go on")
    assert result.out.splitlines()[1:4] == ["Hm.", 'tool call: look {"at": "it"}', "tool call: ping {}"]
    question, answer, _ = bodies[1]["messages"]
    assert question == {"role": "user", "content": "Hi"}
    assert answer["tool_calls"] == [
        {"id": "c0", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}},
        {"id": "c1", "type": "function", "function": {"name": "ping", "arguments": "{}"}},
    ]


def test_an_answer_cannot_take_the_terminal_over(talk):
    with answering(said({"content": "a\x1b[2Jb\x9b31mc\rd\te\u202ef\ud800"})) as (url, _):
        assert talk(url, "Hi").out.splitlines()[1] == "a[2Jb31mcd\tef\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("event", ["data: \x9b2J\x1b]0;{\n\n", {"error": {"message": "\x1b[2J"}}, {"error": "\x1b[2J"}])
def test_neither_can_a_name_or_an_error(talk, event):
    with answering(event, model="ot\x1b]0;her\x07") as (url, _):
        result = talk(url, "Hi")
    assert result.out.startswith("ot]0;her at http")
    assert "[2J" in result.err or "2J]0;{" in result.err
    assert not {"\x1b", "\x9b", "\x07"} & set(result.out + result.err)


def test_a_wrong_command_is_a_sentence_and_goes_to_nobody(talk):
    with answering(said({"content": "Yes."})) as (url, bodies):
        result = talk(url, "/rest", "/think maybe", "/help")
    assert "'/rest' is not a command; /help shows" in result.err
    assert "'/think maybe' is not a command" in result.err
    assert "/system TEXT" in result.out
    assert bodies == []


def test_a_question_that_failed_is_not_kept_and_the_program_goes_on(scripted, talk):
    client = scripted(ANSWER)
    with listening(client.app) as url:
        result = talk(url, "x" * 500, "Hi")
    assert result.code == 0
    assert "context holds 400" in result.err
    assert "It is 42." in result.out
    assert "xxx" not in client.service.tokenizer.decode(client.requests[-1].prompt)


@pytest.mark.parametrize(
    ("chunks", "status", "words"),
    [
        ([said({"content": "Be"}), {"error": {"message": "The engine died."}}], 200, "The engine died."),
        (["Bad gateway"], 502, "/v1/chat/completions answered with status 502."),
        (["data: {oops\n\n"], 200, "streamed an event that is not JSON: {oops"),
        ([f"data: {'[' * 100_000}\n\n"], 200, "streamed an event that is not JSON: [[["),
        (["data: 5\n\n"], 200, "streamed an event that is no object: 5"),
        (['data: "error"\n\n'], 200, "streamed an event that is no object"),
        ([{"choices": [5]}], 200, "no chunk of a chat"),
        ([said({"content": 5})], 200, "no chunk of a chat"),
        ([said({"content": "a"}, usage={"completion_tokens": "b"})], 200, "no chunk of a chat"),
        ([said({"content": "a"}, usage=[1])], 200, "no chunk of a chat"),
        ([said({"tool_calls": [{"index": [], "function": 5}]})], 200, "no chunk of a chat"),
        (["[" * 100_000], 500, "answered with status 500"),
    ],
)
def test_what_breaks_an_answer_is_a_sentence(talk, chunks, status, words):
    with answering(*chunks, status=status) as (url, _):
        result = talk(url, "Hi")
    assert result.code == 0
    assert result.err.startswith("onebox: ")
    assert words in result.err
    assert result.err.count("\n") == 1


def test_a_server_that_is_not_there_is_one_sentence(talk):
    with bind("127.0.0.1", 0) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        result = talk(url)
    assert (result.code, result.out) == (1, "")
    assert re.fullmatch(
        rf"onebox: No server answers at {url} \(.+\); start one with `onebox serve`.*--url\.\n", result.err
    )


@pytest.mark.parametrize("url", ["ftp://x", "http://[::1", "http://x:y"])
def test_an_address_that_is_none_is_named(talk, url):
    result = talk(url)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "--url" in result.err


def test_a_server_of_another_kind_is_one_sentence(talk):
    app = Starlette(routes=[Route("/v1/models", lambda _: PlainTextResponse("<html>"))])
    with listening(app) as url:
        result = talk(url)
    assert result.code == 1
    assert "is this an OpenAI-compatible server?" in result.err


def test_the_key_is_sent(scripted, talk):
    app = Client(scripted(ANSWER).service, ServerSettings(api_keys=(ApiKey("test", "s3cret"),))).app
    with listening(app) as url:
        assert "It is 42." in talk(url, "Hi", options=("--api-key", "s3cret")).out
        refused = talk(url, "Hi")
    assert refused.code == 1
    assert "API key is missing or wrong" in refused.err


def test_in_a_terminal_thinking_is_dim_and_ctrl_d_ends_it(scripted):
    with listening(scripted(ANSWER).app) as url, terminal(url) as (ours, process):
        read_until(ours, rb"> ")
        os.write(ours, b"Hi\n")
        shown = read_until(ours, rb"(?s)\(\d+ tokens.*> ")
        os.write(ours, b"\x04")
        assert process.wait(LIMIT_S) == 0
    assert b"\x1b[2mL" in shown
    assert b"It is 42." in shown.replace(b"\x1b[0m", b"")


@pytest.mark.parametrize(
    ("term", "pasted"), [("xterm", b"\x1b[200~one\ntwo\n\nthree\x1b[201~\n"), ("dumb", b"one\ntwo\n\nthree\n")]
)
def test_what_is_pasted_is_one_message_of_several_lines(term, pasted):
    server = answering(said({"content": "Yes."}, usage={"completion_tokens": 1}))
    with server as (url, bodies), terminal(url, TERM=term) as (ours, process):
        read_until(ours, rb"> ")
        os.write(ours, pasted)
        read_until(ours, rb"(?s)\(1 tokens.*> ")
        os.write(ours, b"/bye\n")
        read_until(ours, rb"Bye\.")
        assert process.wait(LIMIT_S) == 0
    assert [body["messages"] for body in bodies] == [[{"role": "user", "content": "one\ntwo\n\nthree"}]]


def test_ctrl_c_ends_an_answer_and_then_the_program_quietly(scripted):
    client = scripted("</think>Begin" + " and on" * 40)
    hold_after(client, 20)
    with listening(client.app) as url, terminal(url) as (ours, process):
        read_until(ours, rb"> ")
        os.write(ours, b"Hi\n")
        read_until(ours, rb"B.*e.*g.*i.*n")  # a style ends after each part
        process.send_signal(signal.SIGINT)
        shown = read_until(ours, rb"(?s)\(stopped\).*> ")
        client.runner.gate.set()
        process.send_signal(signal.SIGINT)
        # A signal just before the program waits is noticed once it has something to read.
        os.write(ours, b"\n")
        assert process.wait(LIMIT_S) == 0
        shown += os.read(ours, 10_000)
    assert b"Traceback" not in shown
    assert b"onebox:" not in shown


@contextmanager
def terminal(url, **environment):
    """The command in a terminal of its own: (our end of it, the process)."""
    ours, theirs = pty.openpty()
    try:
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        with chatting(url, environment=environment, **streams) as process:
            yield ours, process
    finally:
        os.close(ours)
        os.close(theirs)


def hold_after(client, num_steps):
    """The engine stops after so many steps until its gate is set."""
    start, steps = client.runner.start, []

    def start_some(plan):
        steps.append(plan)
        if len(steps) == num_steps:
            client.runner.gate.clear()
        return start(plan)

    client.runner.start = start_some


@contextmanager
def chatting(url, *words, environment=None, **streams):
    """The command in a process of its own, which a failed test does not wait for."""
    command = [sys.executable, "-m", "onebox.cli.main", "chat", "--url", url, *words]
    environment = {**os.environ, "TERM": "xterm", **(environment or {})}
    with subprocess.Popen(command, text=True, env=environment, **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(end, pattern):
    shown = b""
    while not re.search(pattern, shown):
        assert select.select([end], [], [], LIMIT_S)[0], shown
        part = os.read(end, 1000)
        assert part, shown
        shown += part
    return shown


def test_ctrl_c_ends_a_question_of_a_script_with_the_status_of_an_interruption(scripted):
    client = scripted("</think>Begin" + " and on" * 40)
    hold_after(client, 20)
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with listening(client.app) as url, chatting(url, "Hi", **streams) as process:
        read_until(process.stdout.fileno(), b"Begin")
        process.send_signal(signal.SIGINT)
        wait_until(lambda: client.service.engine._aborted or not client.service.engine._open)
        client.runner.gate.set()
        _, err = process.communicate()
    assert (process.returncode, err) == (130, "onebox: stopped.\n")


def test_a_question_on_the_command_line_is_answered_plainly_and_ends_the_program(scripted, ask):
    client = scripted(ANSWER)
    with listening(client.app) as url:
        assert ask(url, "What", "is 6 × 7?", "--system", "Be short.") == (0, "It is 42.\n", "")
        ask(url, "Why?", "--no-think")
    prompt, unthinking = (client.service.tokenizer.decode(request.prompt) for request in client.requests)
    assert "What is 6 × 7?" in prompt
    assert "Be short." in prompt
    assert [text.rstrip().endswith("</think>") for text in (prompt, unthinking)] == [False, True]


def test_a_file_or_a_pipe_is_one_message_below_the_question(ask):
    with answering(said({"content": "Yes."})) as (url, bodies):
        assert ask(url, piped="a\n\n/help\nb\n") == (0, "Yes.\n", "")
        assert ask(url, "Sum", "up:", piped="a\nb\n") == (0, "Yes.\n", "")
    assert [body["messages"][0]["content"] for body in bodies] == ["a\n\n/help\nb", "Sum up:\n\na\nb"]


@pytest.mark.parametrize(("piped", "words"), [("", "nothing to ask"), (b"\xff\xfe\x00", "not text in utf-8")])
def test_input_that_is_no_question_is_one_sentence(ask, piped, words):
    result = ask("http://127.0.0.1:1", piped=piped)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert words in result.err


def test_bytes_that_are_no_text_are_one_sentence_where_python_takes_any():
    """Without a locale, standard input and arguments hold undecoded bytes as surrogates."""
    with answering(said({"content": "Yes."})) as (url, bodies):
        for words, piped in (((), b"\xff\xfe"), ((b"\xff",), b""), (("Hi", "--system", b"\xff"), b"")):
            command = [sys.executable, "-m", "onebox", "chat", "--url", url, *words]
            done = subprocess.run(
                command,
                input=piped,
                env={**os.environ, "LC_ALL": "C"},
                capture_output=True,
                check=False,
                timeout=LIMIT_S,
            )
            assert (done.returncode, done.stdout) == (2, b"")
            assert done.stderr == b"onebox: The question or the system prompt is not text in UTF-8.\n"
    assert bodies == []


@pytest.mark.parametrize("key", ["schlüssel", "two keys", "a\nb"])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(ask, key):
    refused = ask("http://127.0.0.1:1", "Hi", "--api-key", key)
    assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)
    assert "which no header carries" in refused.err
    assert key not in refused.err


def test_a_script_is_told_what_went_wrong_with_its_question(scripted, ask):
    with listening(scripted(ANSWER).app) as url:
        refused = ask(url, "x" * 500)
    assert (refused.code, refused.out) == (1, "")
    assert "context holds 400" in refused.err
    cut = said({"content": "Ye"}) | {"choices": [{"index": 0, "delta": {"content": "Ye"}, "finish_reason": "length"}]}
    with answering(cut) as (url, _):
        assert ask(url, "Hi") == (0, "Ye\n", "onebox: The answer was cut at its length limit.\n")


def test_a_message_of_several_lines_stands_between_triple_quotes(talk):
    with answering(said({"content": "Yes."})) as (url, bodies):
        talk(url, '"""one', "/help", 'two"""', '"""three"""', "/bye", "never")
    assert [body["messages"][-1]["content"] for body in bodies] == ["one\n/help\ntwo", "three"]
