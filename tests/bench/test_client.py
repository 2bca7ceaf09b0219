"""A server's faults are told for what they are, and good answers are counted right. Over real sockets."""

import asyncio
import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.bench.answer import Ask, StreamedAnswer
from onebox.bench.client import Client, Connection, _events, server_address
from onebox.bench.record import Reason, Role
from onebox.spec.errors import OneboxError, UsageError
from tests.bench.faulty import faulty, word_id

ASK = Ask(({"role": "user", "content": "Say something about foxes."},), max_tokens=12, thinking=False)


def answered(server, ask=ASK, **limits):
    """(answer, client's server) of one request after discovery."""

    async def run():
        async with Client(Connection(server.url, **limits)) as client:
            await client.discover()
            return await client.ask(ask), client

    return asyncio.run(run())


def test_a_good_answer_is_counted_by_its_tokens_and_not_by_its_chunks():
    with faulty(tokens_a_chunk=5, drafts_in_usage=True, cached_tokens=7) as server:
        answer, client = answered(server)
    request = answer.recorded(Role.COLD, answer.sent_at)
    assert answer.failure is None
    assert answer.content == "the quick brown fox jumps over the lazy dog and then it "
    assert answer.token_ids == [word_id(word) for word in answer.content.split()]
    assert (request.completion_tokens, len(request.arrivals_s), request.arrival_tokens) == (12, 3, (5, 5, 2))
    assert (request.prompt_tokens, request.cached_tokens, request.counted_by) == (7, 7, "usage")
    assert (request.accepted_drafts, request.rejected_drafts) == (6, 3)
    assert 0 < request.first_s <= request.arrivals_s[-1] <= request.total_s
    assert request.start_s == 0
    assert client.server.gives_token_ids


@pytest.mark.parametrize(
    ("fault", "reason", "status", "words"),
    [
        ("400", Reason.REFUSED, 400, "a scripted 400"),
        ("429", Reason.REFUSED, 429, "a scripted 429"),
        ("500", Reason.SERVER_ERROR, 500, "a scripted 500"),
        ("html", Reason.SERVER_ERROR, 502, "Bad gateway"),
        ("cut", Reason.CUT, 200, "After 4 chunks"),
        ("cut early", Reason.CUT, 200, "After 0 chunks"),
        ("no answer", Reason.CUT, None, "After 0 chunks"),
        ("no finish", Reason.CUT, 200, "without a finish_reason"),
        ("no done", Reason.CUT, 200, r"without the final event \[DONE\]"),
        ("stall", Reason.STALL, 200, "No event for 0.3 s after 4 chunks"),
        ("silent stall", Reason.STALL, 200, "No event for 0.3 s after 0 chunks"),
        ("error event", Reason.ERROR_EVENT, 200, "the engine died"),
        ("not json", Reason.MALFORMED, 200, "not a JSON object"),
        ("empty", Reason.EMPTY, 200, "without a token"),
        ("overstated", Reason.WRONG_USAGE, 200, "usage counts 36 tokens; at most 12"),
        ("understated", Reason.WRONG_USAGE, 200, "usage counts 4 tokens and 12 token ids"),
        ("bad sum", Reason.WRONG_USAGE, 200, r"usage reports 7 \+ 12 = 26"),
        ("duplicates", Reason.DUPLICATE, 200, "6 chunks were sent twice: 24 token ids, 12 without"),
        ("two ends", Reason.DUPLICATE, 200, "sent 2 times"),
    ],
)
def test_every_fault_has_its_own_name(fault, reason, status, words):
    with faulty(fault) as server:
        answer, _ = answered(server, stall_s=0.3, first_token_s=0.3)
    assert answer.failure is not None
    assert (answer.failure.reason, answer.failure.status) == (reason, status)
    assert re.search(words, answer.failure.message), answer.failure.message


def test_usage_that_counts_tokens_nobody_sent_is_wrong_even_below_the_limit():
    with faulty("overstated") as server:
        answer, _ = answered(server, Ask(ASK.messages, max_tokens=100, thinking=False))
    assert answer.failure.reason is Reason.WRONG_USAGE
    assert "usage counts 36 tokens and only 12 token ids were sent" in answer.failure.message


def test_usage_that_counts_another_prompt_is_wrong():
    with faulty("wrong prompt") as server:
        many = " ".join(["word"] * 50)
        answer, _ = answered(server, Ask(({"role": "user", "content": many},), max_tokens=8, prompt_tokens=53))
    assert answer.failure.reason is Reason.WRONG_USAGE
    assert "usage counts 106 tokens of a prompt that has 53" in answer.failure.message


def test_without_usage_token_ids_are_counted_and_without_both_nothing_is():
    with faulty("no usage") as server:
        answer, _ = answered(server)
        assert answer.failure is None
        request = answer.recorded(Role.COLD, 0)
        assert (request.completion_tokens, request.counted_by) == (12, "token_ids")
    with faulty("no usage", knows={"ignore_eos"}) as server:
        answer, client = answered(server)
        assert answer.failure.reason is Reason.NO_USAGE
        assert not client.server.gives_token_ids


def event(number, text):
    chunk = {"choices": [{"delta": {"content": text}, "token_ids": [number]}]}
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\r\n\r\n: still here\n\n"


EVENTS = "".join(map(event, range(5), ("Öt ", "hűtőház", " 🦊", "\n", "İstanbul"))).encode()


@given(st.lists(st.integers(0, len(EVENTS)), max_size=30))
def test_however_the_bytes_are_cut_the_answer_is_the_same(cuts):
    class Cut:
        async def aiter_bytes(self):
            for start, end in itertools.pairwise([0, *sorted(cuts), len(EVENTS)]):
                yield EVENTS[start:end]

    async def read():
        answer = StreamedAnswer(ASK, 0.0)
        async for data, _ in _events(Cut()):
            answer.take(data, 0.0)
        return answer

    answer = asyncio.run(read())
    assert answer.content == "Öt hűtőház 🦊\nİstanbul"
    assert answer.token_ids == [0, 1, 2, 3, 4]
    assert answer.failure is None


def test_a_whole_answer_that_takes_too_long_is_a_timeout():
    with faulty(chunk_delay_s=0.1) as server:
        answer, _ = answered(server, timeout_s=0.35)
    assert answer.failure.reason is Reason.TIMEOUT


def test_what_stalls_took_until_it_was_given_up():
    with faulty("stall") as server:
        answer, _ = answered(server, stall_s=0.3)
    assert answer.total_s >= answer.arrivals_s[-1] + 0.3


def test_a_repeated_word_is_no_duplicate():
    """Equal events follow each other where a model repeats itself; the counts tell the two apart."""
    with faulty(answer_tokens=40, tokens_a_chunk=18) as server:
        # 18 words are one round of the server's text, so both whole chunks are equal.
        answer, _ = answered(server, Ask(ASK.messages, max_tokens=36, thinking=False))
    assert answer.num_repeats == 1
    assert answer.failure is None


def test_discovery_finds_out_what_the_server_is_and_takes():
    with faulty(knows={"ignore_eos"}, modalities=None) as server:
        _, client = answered(server)
    found = client.server
    assert (found.model, found.kind, found.version, found.max_model_len) == ("fake", "fakes", "1.2.3", 4096)
    assert client.accepts == {"ignore_eos"}
    assert (found.tokenizer, found.is_local) == ("vllm", True)
    assert "return_token_ids" not in server.bodies[0]
    assert "chat_template_kwargs" not in server.bodies[0]


@pytest.mark.parametrize("form", ["vllm", "llamacpp", ""])
def test_prompts_are_counted_in_the_servers_tokens_however_it_tells_them(form):
    async def run(url):
        async with Client(Connection(url)) as client:
            await client.discover()
            return client.server.tokenizer, await client.count_prompt(ASK)

    with faulty(tokenizer=form) as server:
        assert asyncio.run(run(server.url)) == (form, 7)


def test_what_cannot_be_asked_at_all_is_one_sentence():
    async def run(url, **options):
        async with Client(Connection(url, **options)) as client:
            await client.discover()

    with pytest.raises(OneboxError, match=r"No server answers at http://127\.0\.0\.1:9 "):
        asyncio.run(run("127.0.0.1:9"))
    with faulty() as server, pytest.raises(UsageError, match=r"--model is 'other'; http://.* serves fake"):
        asyncio.run(run(server.url, model="other"))
    with faulty("", max_model_len=3) as server, pytest.raises(OneboxError, match=r"first short chat \(status 400\)"):
        asyncio.run(run(server.url))


@pytest.mark.parametrize("url", ["ftp://x", "http://", "://", ""])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(UsageError, match="--url is"):
        server_address(url)


def test_addresses_are_taken_with_and_without_scheme_and_path():
    assert {server_address(url) for url in ("h:1", "http://h:1", "http://h:1/v1", "http://h:1/v1/")} == {"http://h:1"}
