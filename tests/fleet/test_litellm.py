"""LiteLLM in front, with the plugin that asks members what they have cached; `make fleet-test` installs it."""

import os
from pathlib import Path

import openai
import pytest

from tests.fleet.conftest import HTTP, STEP_S, fleet_of_three, wait_until
from tests.fleet.test_faults import answers_of

pytestmark = pytest.mark.fleet
PROGRAM = os.environ.get("LITELLM", str(Path(__file__).parents[2] / ".venv-fleet" / "bin" / "litellm"))

KEY = "sk-6d0f4b1e5a9c47d2b8e3f7a16c2d9e05"


def behind_litellm(nursery, directory, **settings):
    """Three servers behind LiteLLM."""
    (directory / "key").write_text(KEY)
    return fleet_of_three(
        nursery, directory, router="litellm", router_command=PROGRAM, api_key_file="key", **settings
    ).running()


@pytest.fixture(scope="module")
def litellm(nursery, tmp_path_factory):
    with behind_litellm(nursery, tmp_path_factory.mktemp("litellm")) as running:
        yield running


def client(fleet):
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key=KEY, max_retries=0, http_client=HTTP)


def ask(fleet, *texts, **options):
    """A chat of user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    return client(fleet).chat.completions.create(model="tiny", messages=messages, max_tokens=4, **options)


def answered_by(fleet, *texts, **options):
    before = answers_of(fleet)
    ask(fleet, *texts, **options)
    after = answers_of(fleet)
    (name,) = [name for name in after if after[name] > before[name]]
    return name


def test_a_conversation_stays_where_its_prefix_is(litellm):
    opening = "A long text that is worth keeping. " * 12
    others = [answered_by(litellm, f"{number} {'other words here. ' * 20}") for number in range(6)]
    assert len(set(others)) > 1, "requests without a prefix are spread"
    first = answered_by(litellm, opening)
    assert [answered_by(litellm, opening, "Yes.", f"Question {number}?") for number in range(5)] == [first] * 5


def test_a_session_stays_with_its_member(nursery, tmp_path):
    with behind_litellm(nursery, tmp_path, policy="session_affinity") as fleet:
        for session in ("conversation1", "conversation2"):
            headers = {"x-session-id": session}
            members = {answered_by(fleet, f"Number {number}", extra_headers=headers) for number in range(5)}
            assert len(members) == 1


def test_a_drained_member_gets_nothing_though_it_has_the_prefix(litellm):
    opening = "Another text that is worth keeping. " * 12
    first = answered_by(litellm, opening)
    litellm.admin("POST", f"/members/{first}/drain")
    assert answered_by(litellm, opening, "Yes.", "And now?") != first
    litellm.admin("POST", f"/members/{first}/resume")


def test_a_killed_member_is_replaced_and_its_streams_end_with_an_error(litellm, nursery):
    before = {name: litellm.member(name)["num_open"] for name in litellm.ports}
    messages = [{"role": "user", "content": "A stream"}]
    chunks = client(litellm).chat.completions.create(
        model="tiny", messages=messages, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(chunks)
    (victim,) = [name for name in before if litellm.member(name)["num_open"] > before[name]]
    litellm.kill(victim)
    assert [bool(ask(litellm, f"After {number}").choices) for number in range(6)] == [True] * 6
    with pytest.raises(openai.APIError, match="broke off"):
        list(chunks)
    litellm.wait_state(victim, "down")
    litellm.pids[victim] = nursery.start(litellm.ports[victim], step_s=STEP_S)
    litellm.wait_state(victim, "up")
    wait_until(lambda: answered_by(litellm, "Anything at all") == victim)
