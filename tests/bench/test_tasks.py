"""Prompts have the length that is written, in the server's own tokens, and begin as no other does."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.bench.client import Client, Connection
from onebox.bench.fit import fit
from onebox.bench.session import BenchSettings, Session, Silence
from onebox.bench.tasks import SETS, TASKS, Padding, chosen_tasks, document_picture
from onebox.bench.texts import KEY_SENTENCE
from onebox.spec.errors import UsageError
from tests.bench.faulty import faulty, prompt_words


@given(
    wanted=st.integers(1, 5000),
    bare=st.integers(1, 200),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=7),
)
def test_a_length_is_met_exactly_whatever_words_cost(wanted, bare, sizes):
    """Words of one to five tokens in any order; a letter is one token."""

    async def count(padding):
        rounds, rest = divmod(padding.words, len(sizes))
        return bare + rounds * sum(sizes) + sum(sizes[:rest]) + padding.tail

    found = asyncio.run(fit(count, wanted))
    assert found.prompt_tokens == max(wanted, bare)


def test_a_server_that_cannot_count_is_said_to():
    async def count(padding):
        return None

    found = asyncio.run(fit(count, 100))
    assert found.prompt_tokens is None
    assert "not exact" in found.note(100)


def prepared(task, **options):
    async def run(url):
        async with Client(Connection(url)) as client:
            await client.discover()
            session = Session(client, BenchSettings(seed=3, max_context=options.get("max_context")), Silence())
            made = await session.prepare(task)
            return made, made.ask(session.nonce()), made.ask(session.nonce())

    with faulty(max_model_len=200_000) as server:
        return asyncio.run(run(server.url))


@pytest.mark.parametrize("key", [key for key, task in TASKS.items() if not task.with_picture])
def test_every_prompt_has_its_length_and_its_own_beginning(key):
    task = TASKS[key]
    made, first, second = prepared(task)
    body = {"messages": list(first.messages), "tools": list(first.tools)}
    assert len(prompt_words(body)) == task.prompt_tokens == made.fit.prompt_tokens
    assert made.notes == ()
    texts = [ask.messages[0]["content"] for ask in (first, second)]
    assert texts[0][:24] != texts[1][:24]
    assert len(prompt_words({"messages": list(second.messages), "tools": list(second.tools)})) == task.prompt_tokens
    if task.with_tools:
        assert first.tools != second.tools


def test_what_is_asked_for_stands_in_the_long_document():
    _, ask, _ = prepared(TASKS["rag-8k"])
    assert KEY_SENTENCE in ask.messages[1]["content"]


@pytest.mark.parametrize(("key", "context", "lengths"), [("rag-32k", 8192, (7936, 256)), ("longcode", 1024, (96, 928))])
def test_a_task_is_scaled_to_a_small_context_and_says_so(key, context, lengths):
    wanted = TASKS[key].scaled(context)
    assert (wanted.prompt_tokens, wanted.max_tokens) == lengths
    assert f"the context holds {context:,}" in wanted.note
    assert TASKS[key].scaled(1 << 20).note == ""


@given(st.integers(256, 1 << 18))
def test_whatever_the_context_prompt_and_answer_fit_it(context):
    for task in TASKS.values():
        wanted = task.scaled(context)
        assert wanted.prompt_tokens + wanted.max_tokens <= context
        assert min(wanted.prompt_tokens, wanted.max_tokens) >= min(64, task.max_tokens, task.prompt_tokens)


def test_the_published_answer_lengths_are_kept():
    assert [task.max_tokens for task in SETS["short"]] == [256, 512, 1024, 64, 2048]
    assert [task.temperature for task in SETS["short"]] == [0.0] * 5
    assert [task.max_tokens for task in SETS["modes"]] == [400, 500, 200, 524, 128]


def test_tasks_are_chosen_by_set_and_by_name():
    assert [task.key for task in chosen_tasks(["math", "qa", "math"])] == ["qa", "math"]
    assert chosen_tasks(["short"]) == SETS["short"]
    assert len(chosen_tasks(["all"])) == len(TASKS) == 16
    with pytest.raises(UsageError, match="There is no workload 'q&a'; there are all, short, docai, modes, qa, code"):
        chosen_tasks(["q&a"])


def test_the_picture_is_a_picture():
    import io

    from PIL import Image

    picture = Image.open(io.BytesIO(document_picture()))
    assert picture.size == (896, 640)
    assert len(picture.convert("L").getcolors()) > 2
    ask = TASKS["vision"].ask("1", Padding(), 8)
    assert ask.messages[1]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
