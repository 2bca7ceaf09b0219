"""`onebox scaleout compare` against a real onebox server of the pocket model; tests/vllm has vLLM on the other side."""

import json

import pytest

from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.scaleout.compare import ServedModel, compare_servers
from onebox.spec.errors import MismatchError
from tests.server.launching import launched

KEY = "sesame"
PROMPTS = ("The capital of Hungary is", "1, 1, 2, 3, 5,")


@pytest.fixture(scope="module")
def url():
    with launched(MODEL_DIRECTORY, "--language-model-only", "--api-key", KEY) as served:
        yield served


@pytest.fixture
def connect(url):
    """Connections to the server, closed in the end."""
    opened = []

    def connected(kind=ServedModel, more=""):
        opened.append(kind(f"{url}{more}", KEY))
        return opened[-1]

    yield connected
    for one in opened:
        one.close()


class Shifted(ServedModel):
    """The same server, its scores as if a scale were lost."""

    by = 0.0

    def scores(self, tokens):
        return [{token: value - self.by for token, value in place.items()} for place in super().scores(tokens)]


class OtherTokens(ServedModel):
    def tokenize(self, text):
        return [*super().tokenize(text), 1]


def test_a_server_is_one_model_with_itself(connect):
    found = compare_servers(connect(), connect(more="/v1"), prompts=PROMPTS)
    assert found.is_same
    assert found.mean_difference == 0
    assert all(one.num_equal_tokens == one.num_continued == 24 for one in found.prompts)
    assert found.prompts[0].num_tokens > 24


@pytest.mark.parametrize(("by", "is_same"), [(0.05, True), (0.07, False)])
def test_the_verdict_follows_the_mean_difference(connect, by, is_same):
    shifted = connect(Shifted)
    shifted.by = by
    found = compare_servers(shifted, connect(), prompts=PROMPTS[:1])
    assert found.mean_difference == pytest.approx(by)
    assert found.is_same is is_same
    assert found.verdict.startswith("One model" if is_same else "Not one model")


def test_other_tokens_are_another_model(connect):
    with pytest.raises(MismatchError, match="tokenise"):
        compare_servers(connect(OtherTokens), connect(), prompts=PROMPTS)


def test_the_command_prints_both_sides(url, run_cli, monkeypatch):
    monkeypatch.setattr(compare_servers, "__defaults__", (0.06, PROMPTS[1:]))
    refused = run_cli("scaleout", "compare", url, url)
    assert refused.code == 1
    assert "answered 401" in refused.err
    result = run_cli("scaleout", "compare", url, url, "--api-key", KEY)
    assert result.code == 0, result.err
    assert "One model" in result.out
    found = json.loads(run_cli("scaleout", "compare", url, url, "--api-key", KEY, "--json").out)
    assert found["is_same"] is True
    assert found["prompts"][0]["equal_greedy_tokens"] == 24


def test_a_server_that_is_not_there_is_said_in_a_sentence(run_cli):
    result = run_cli("scaleout", "compare", "127.0.0.1:9", "127.0.0.1:9")
    assert result.code == 2
    assert "does not answer" in result.err
