"""A small OpenAI-compatible server over real sockets that can be told to misbehave. Its tokens are words.

Written on plain asyncio, so that a connection can be cut, held or fed byte by byte as no framework would.
"""

import asyncio
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

TRIALS = ("Count from one to three.", "What is this?")
TEXT = "the quick brown fox jumps over the lazy dog and then it rests a while by the river"
WORDS = TEXT.split()
TEMPLATE_TOKENS = 3  # of each message, beside its words
EXTRA_FIELDS = {"return_token_ids", "ignore_eos", "min_tokens", "chat_template_kwargs", "seed"}
KNOWN_FIELDS = {"model", "messages", "prompt", "max_tokens", "temperature", "stream", "stream_options", "tools", "seed"}


@dataclass
class Behaviour:
    """How the server is, and what it does wrong."""

    fault: str = ""
    fault_of: object = None
    """Called with the number of a request; gives its fault. Trials before a run are not counted."""
    answer_of: object = None
    """Called with the body of a chat; gives the answer's text. None: the words that every answer has."""
    knows: set = field(default_factory=lambda: set(EXTRA_FIELDS))
    tokenizer: str = "vllm"
    max_model_len: int | None = 4096
    modalities: tuple | None = ("text",)
    answer_tokens: int = 12
    tokens_a_chunk: int = 2
    chunk_delay_s: float = 0.0
    drafts_in_usage: bool = False
    drafts_in_metrics: bool = False
    cached_tokens: int = 0
    has_health: bool = True


class FaultyServer:
    """Serves until closed; `bodies` are the generations that were asked for, trials left out."""

    def __init__(self, behaviour, port=0):
        self.behaviour = behaviour
        self._wanted_port = port
        self.bodies = []
        self.most_at_once = 0
        self._at_once = 0
        self._num_steps = 0
        self._writers = []
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._started.wait(10)

    @property
    def url(self):
        return f"http://127.0.0.1:{self._port}"

    def _run(self):
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", self._wanted_port))
        self._port = self._server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._hang_up())
        self._loop.close()

    async def _hang_up(self):
        """Ends every connection, whoever is still reading, and lets the loop let go of its socket."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        for _ in range(3):
            await asyncio.sleep(0)

    def close(self):
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _serve(self, reader, writer):
        self._writers.append(writer)
        try:
            while head := await _head(reader):
                path, length = head
                body = json.loads(await reader.readexactly(length)) if length else {}
                if await self._answer(path, body, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the other side left, or the server is being closed
        finally:
            writer.close()

    async def _answer(self, path, body, writer):
        """Whether the connection is at its end."""
        be = self.behaviour
        if path.startswith(("/v1/chat/completions", "/v1/completions")):
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            try:
                return await self._generate(body, writer)
            finally:
                self._at_once -= 1
        if path == "/v1/models":
            model = {"id": "fake", "owned_by": "fakes", "max_model_len": be.max_model_len}
            if be.modalities is not None:
                model["input_modalities"] = list(be.modalities)
            return _reply(writer, 200, {"data": [model]})
        if path == "/version":
            return _reply(writer, 200, {"version": "1.2.3"})
        if path == "/health":
            return _reply(writer, 200 if be.has_health else 503, {})
        if path == "/metrics" and be.drafts_in_metrics:
            return _reply(writer, 200, self._metrics(), "text/plain")
        if path == "/tokenize":
            return self._tokenize(body, writer)
        if path == "/apply-template" and be.tokenizer == "llamacpp":
            return _reply(writer, 200, {"prompt": " ".join(prompt_words(body))})
        return _reply(writer, 404, {"error": {"message": f"no {path} here"}})

    def _tokenize(self, body, writer):
        form = self.behaviour.tokenizer
        if form == "vllm" and ("prompt" in body or "messages" in body):
            words = prompt_words(body)
            return _reply(writer, 200, {"count": len(words), "tokens": [word_id(word) for word in words]})
        if form == "llamacpp" and "content" in body:
            return _reply(writer, 200, {"tokens": [word_id(word) for word in body["content"].split()]})
        return _reply(writer, 404, {"error": {"message": "no tokenizer"}})

    def _metrics(self):
        drafted = 2 * self._num_steps
        return (
            "# TYPE vllm:spec_decode_num_drafts counter\n"
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {self._num_steps}\n'
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {1.5 * self._num_steps}\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {self._num_steps}\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {self._num_steps / 2}\n'
            'onebox:memory_bytes{model_name="fake",part="weights"} 1024.0\n'
            'onebox:startup_seconds{model_name="fake",phase="weights"} 0.5\n'
        )

    async def _generate(self, body, writer):
        be = self.behaviour
        unknown = body.keys() - KNOWN_FIELDS - be.knows
        if unknown:
            return _reply(writer, 400, {"error": {"message": f"unknown field {sorted(unknown)[0]}"}})
        if any(trial in json.dumps(body.get("messages", "")) for trial in TRIALS):
            fault = ""
        else:
            self.bodies.append(body)
            fault = be.fault_of(len(self.bodies) - 1) if be.fault_of else be.fault
        num_prompt = len(prompt_words(body))
        if be.max_model_len and num_prompt + body["max_tokens"] > be.max_model_len:
            message = (
                f"{num_prompt} + {body['max_tokens']} tokens are asked for and the context holds {be.max_model_len}"
            )
            return _reply(writer, 400, {"error": {"message": message}})
        if fault in ("400", "429", "500", "503"):
            return _reply(writer, int(fault), {"error": {"message": f"a scripted {fault}"}})
        if fault == "html":
            return _reply(writer, 502, "<html>Bad gateway</html>", "text/html")
        if fault == "no answer":
            return True
        await self._stream(body, writer, fault, num_prompt)
        return fault in ("cut", "cut early")

    async def _stream(self, body, writer, fault, num_prompt):
        be = self.behaviour
        limit = body["max_tokens"]
        made = limit if body.get("ignore_eos") and fault != "ends early" else min(limit, be.answer_tokens)
        words = [f"{WORDS[place % len(WORDS)]} " for place in range(made)]
        if be.answer_of:
            words = re.findall(r"\S+\s*|^\s+", be.answer_of(body))[:limit]
            made = len(words)
        self._num_steps += made
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if fault == "cut early":
            return
        _event(writer, _chunk({"role": "assistant", "content": ""}))
        if fault == "silent stall":
            for _ in range(40):
                _piece(writer, b": still here\n\n")
                await writer.drain()
                await asyncio.sleep(0.05)
        step = be.tokens_a_chunk
        for place in range(0, 0 if fault == "empty" else made, step):
            if be.chunk_delay_s:
                await asyncio.sleep(be.chunk_delay_s)
            part = words[place : place + step]
            ids = [word_id(word) for word in part] if body.get("return_token_ids") else None
            chunk = _chunk({"content": "".join(part)}, token_ids=ids)
            _event(writer, chunk)
            if fault == "duplicates":
                _event(writer, chunk)
            await writer.drain()
            if place >= made // 2:
                if fault == "cut":
                    return
                if fault == "stall":
                    await asyncio.sleep(5)
                if fault == "error event":
                    _event(writer, {"error": {"message": "the engine died", "code": 500}})
                    break
                if fault == "not json":
                    _piece(writer, b"data: {oops\n\n")
        await self._end(body, writer, fault, num_prompt, made)

    async def _end(self, body, writer, fault, num_prompt, made):
        be = self.behaviour
        if fault != "no finish":
            _event(writer, _chunk({}, finish_reason="length" if made == body["max_tokens"] else "stop"))
        if fault == "two ends":
            _event(writer, _chunk({}, finish_reason="stop"))
        counted = {"overstated": 3 * made, "understated": made // 3}.get(fault, made)
        read = num_prompt * 2 if fault == "wrong prompt" else num_prompt
        usage = {"prompt_tokens": read, "completion_tokens": counted, "total_tokens": read + counted}
        if fault == "bad sum":
            usage["total_tokens"] += 7
        usage["prompt_tokens_details"] = {"cached_tokens": be.cached_tokens}
        if be.drafts_in_usage:
            details = {"accepted_prediction_tokens": made // 2, "rejected_prediction_tokens": made // 4}
            usage["completion_tokens_details"] = details
        if fault != "no usage":
            _event(writer, {"choices": [], "usage": usage})
        if fault != "no done":
            _piece(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


@contextmanager
def faulty(fault="", **options):
    """A server with this fault; gives it."""
    server = FaultyServer(Behaviour(fault, **options))
    try:
        yield server
    finally:
        server.close()


async def _head(reader):
    """(path, body's length) of the next request; None where there is none."""
    line = (await reader.readline()).decode()
    if not line:
        return None
    _, path, _ = line.split()
    length = 0
    while (header := (await reader.readline()).decode().strip()) != "":
        name, _, value = header.partition(":")
        if name.lower() == "content-length":
            length = int(value)
    return path, length


def _reply(writer, status, body, content_type="application/json"):
    data = (body if isinstance(body, str) else json.dumps(body)).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    return False


def _piece(writer, data):
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _event(writer, body):
    _piece(writer, b"data: " + json.dumps(body).encode() + b"\n\n")


def _chunk(delta, finish_reason=None, token_ids=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    if token_ids is not None:
        choice["token_ids"] = token_ids
    return {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "fake", "choices": [choice]}


def prompt_words(body):
    """The tokens of a prompt: its words, and some for the template."""
    if "messages" not in body:
        return str(body.get("prompt", "")).split()
    words = json.dumps(body["tools"]).split() if body.get("tools") else []
    for message in body["messages"]:
        content = message["content"]
        texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        words += ["<template>"] * TEMPLATE_TOKENS + " ".join(texts).split()
    return words


def word_id(word):
    return int.from_bytes(hashlib.sha256(word.strip().encode()).digest()[:2], "big")
