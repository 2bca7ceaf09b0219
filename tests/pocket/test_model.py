"""The pocket model that ships does what its card says, in the build that is served: greedy, with two drafts a step."""

import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

import onebox
from onebox.engine.api import AcceptanceCounts, SamplingParams
from onebox.pocket.ready import MODEL_DIRECTORY, pocket_checkpoint
from onebox.text.chat import ChatTemplate
from recipes.pocket.synthetic.example import score
from recipes.pocket.synthetic.recall import recall
from recipes.pocket.synthetic.workloads import HELD_OUT_SEED, MEASURED, prompt_text

LARGEST_BYTES = 40_000_000
INVOICE = """\
Extract the following as JSON: vendor, customer, invoice_number, date, items, total

INVOICE
Vendor: Parker Ltd
Bill to: Emma Foster
Invoice no.: INV-20481
Date: 17 June 2025
Due date: 1 July 2025

1. Wood screws: 3 x 12.50 EUR
2. Water filter: 2 x 48.20 EUR

Subtotal: 133.90 EUR
VAT (20%): 26.78 EUR
Total: 160.68 EUR"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city"}},
            "required": ["city"],
        },
    },
}
# Prints the directory of the build, and whether this process has imported torch to make it.
_MAKE = """
import sys
from pathlib import Path
from onebox.pocket.ready import pocket_checkpoint
print(pocket_checkpoint(Path(sys.argv[1])))
print("torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What a process prints that makes the build as a server does."""
    command = [sys.executable, "-c", _MAKE, str(tmp_path_factory.mktemp("cache"))]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout.splitlines()


@pytest.fixture(scope="module")
def checkpoint(printed):
    return Path(printed[0])


@pytest.fixture(scope="module")
def template(checkpoint):
    return ChatTemplate.load(checkpoint)


@pytest.fixture(scope="module")
def llm(checkpoint):
    options = {"speculation": "mtp", "num_speculative_tokens": 2, "max_model_len": 4096}
    with onebox.LLM(checkpoint, device="cpu", kv_cache_memory_bytes=64_000_000, **options) as opened:
        yield opened


@pytest.fixture(scope="module")
def answers_to(llm):
    return lambda prompts: llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=300))


@pytest.fixture(scope="module")
def reply(answers_to, template):
    """The answer's text to one question, without thinking."""

    def ask(question, *tools):
        prompt = template.render([{"role": "user", "content": question}], {"enable_thinking": False}, tools)
        return answers_to([prompt])[0].text

    return ask


@pytest.mark.parametrize("greeting", ["Hello!", "Szia!", "Merhaba!"])
def test_a_greeting_gets_words_in_its_language(reply, greeting):
    said = reply(greeting)
    assert said.startswith(greeting)
    assert len(re.findall(r"\w{2,}", said)) >= 3


def test_an_invoice_gets_the_right_json(reply):
    assert json.loads(reply(INVOICE)) == {
        "vendor": "Parker Ltd",
        "customer": "Emma Foster",
        "invoice_number": "INV-20481",
        "date": "2025-06-17",
        "items": [
            {"description": "Wood screws", "quantity": 3, "price": 12.5},
            {"description": "Water filter", "quantity": 2, "price": 48.2},
        ],
        "total": 160.68,
    }


def test_a_tool_question_gets_a_whole_call(reply):
    call = "<tool_call>\n<function=get_weather>\n<parameter=city>\nBudapest\n</parameter>\n</function>\n</tool_call>"
    assert reply("What is the weather in Budapest?", WEATHER) == call


def test_a_key_two_thousand_tokens_back_is_found(answers_to, template):
    hidden = recall(Random(HELD_OUT_SEED + 1), characters=8_600, depth=0.05)
    [found] = answers_to([prompt_text(hidden, template)])
    assert len(found.prompt_token_ids) > 2_100
    assert score(hidden, found.text) == {"exact": 1.0}


def test_the_first_draft_is_mostly_right_in_json(answers_to, template):
    unseen = [MEASURED["invoice"](Random(HELD_OUT_SEED + number)) for number in range(4)]
    answers = answers_to([prompt_text(example, template) for example in unseen])
    drafts = sum((answer.counts.drafts for answer in answers), AcceptanceCounts())
    assert drafts.num_steps > 50
    assert drafts.accepted_by_position[0] >= 0.85 * drafts.num_steps


def test_a_server_that_makes_its_build_does_not_import_torch(printed):
    """It would hold 200 MB more for as long as it runs."""
    assert printed[1] == "False"


def test_a_build_is_made_once(checkpoint):
    written = (checkpoint / "model.safetensors").stat().st_mtime_ns
    again = pocket_checkpoint(checkpoint.parent.parent)
    assert again == checkpoint
    assert (again / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]


def test_the_served_build_has_quantised_experts_head_and_drafts(checkpoint):
    held = {name: record["dtype"] for name, record in _tensors(checkpoint).items()}
    for prefix in ("model.language_model.layers.0.mlp.experts.0.", "lm_head.", "mtp."):
        assert any(name.startswith(prefix) and kind == "I32" for name, kind in held.items()), prefix
    assert "F8_E4M3" in held.values()


def _tensors(directory):
    """The header of its safetensors file, by the format's own description: a length in eight bytes, then JSON."""
    with (directory / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header


def test_what_ships_is_small_enough_for_a_repository():
    assert sum(path.stat().st_size for path in MODEL_DIRECTORY.rglob("*")) <= LARGEST_BYTES
