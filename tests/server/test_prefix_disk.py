"""`onebox serve --prefix-dir` as a process: prompts are found after it was killed, and nothing depends on the files."""

import re
import shutil
import signal

import httpx
import openai

from tests.server.conftest import wait_until
from tests.server.launching import started

TEXT = " ".join(f"Item {number} has the key {number * 7919 % 10007}." for number in range(70))
GREEDY = {"max_tokens": 6, "temperature": 0, "logprobs": True}


def conversation(text=TEXT, question="Which key has item 3?"):
    return [{"role": "system", "content": text}, {"role": "user", "content": question}]


class Served:
    """One server, as its clients see it."""

    def __init__(self, url):
        self.url = url
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(self, messages, **fields):
        """(what is said with its log-probabilities, cached tokens, their tier), by OpenAI's own client."""
        answer = self._client.chat.completions.create(
            model="pocket", messages=messages, **GREEDY, extra_body=fields or None
        )
        details = answer.usage.prompt_tokens_details
        told = [(token.token, token.logprob) for token in answer.choices[0].logprobs.content]
        return told, details.cached_tokens, getattr(details, "cached_tier", None)

    def look_up(self, messages, **fields):
        """(cached tokens, their tier)"""
        found = httpx.post(f"{self.url}/v1/cache/lookup", json={"messages": messages, **fields}, timeout=120).json()
        return found["cached_tokens"], found["tier"]

    def disk(self, name):
        metrics = httpx.get(f"{self.url}/metrics", timeout=120).text
        found = re.search(rf"^onebox:prefix_disk_{name}{{.*?}} (\S+)$", metrics, re.MULTILINE)
        return float(found.group(1)) if found else None


def test_prompts_are_found_after_a_kill_and_nothing_depends_on_the_files(tmp_path, run_cli):
    kept, limit = tmp_path / "kept", 5_000_000
    with started("--prefix-dir", kept, "--prefix-disk-bytes", limit) as (process, url):
        server = Served(url)
        server.ask(conversation("A secret. " * 60), cache_prompt=False)
        for number in range(3):
            server.ask(conversation(f"No. {number}. {TEXT}"))
        assert server.look_up(conversation()) == (0, None)
        cold, *nothing = server.ask(conversation())
        assert nothing == [0, None]
        # Each takes 2.3 MB: two had to go before the last one was written.
        wait_until(lambda: server.disk("evicted_total") == 2 and server.disk("entries") == 2)
        assert 0 < server.disk("bytes") <= limit
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert sum(file.stat().st_size for file in kept.rglob("*") if file.is_file()) <= limit
    with started("--prefix-dir", kept, "--prefix-disk-bytes", limit) as (process, url):
        server = Served(url)
        found = server.look_up(conversation())
        assert found[0] > 800
        assert found[1] == "disk"
        assert server.look_up(conversation(), cache_prompt=False) == (0, None)
        assert server.disk("read_bytes_total") == 0, "a lookup read from the disk"
        assert server.ask(conversation()) == (cold, *found)
        other = server.look_up(conversation(question="And item 4?"))
        assert server.ask(conversation(question="And item 4?"))[1:] == other == (found[0], "memory")
        for gone in (f"No. 0. {TEXT}", "A secret. " * 60):
            assert server.look_up(conversation(gone)) == (0, None)
        assert run_cli("cache", "rm", "--all", "--dir", kept).code == 0
        # Figures are those of the last step, and the directory is looked at every second.
        wait_until(lambda: server.ask(conversation("Hi."), cache_prompt=False) and server.disk("entries") == 0)
        assert server.ask(conversation()) == (cold, found[0], "memory")
        shutil.rmtree(kept)
        assert server.ask(conversation("Other. " + TEXT))[1:] == (0, None)
        assert server.ask(conversation()) == (cold, found[0], "memory")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == 0
