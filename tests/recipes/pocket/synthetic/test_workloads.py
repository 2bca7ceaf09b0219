"""The generated workloads: right answers, honest scores, exact tokens."""

import hashlib
import json
import re
from random import Random

import pytest

from onebox.model.random_text import text_files
from onebox.pocket.ready import MODEL_DIRECTORY
from onebox.text.chat import ChatTemplate
from onebox.text.tokenizer import Tokenizer
from recipes.pocket.data.sources import TextSource
from recipes.pocket.data.tokens import write_token_files
from recipes.pocket.synthetic import filler as filler_module
from recipes.pocket.synthetic.example import Example, calls, json_value, score, text_is
from recipes.pocket.synthetic.filler import use_documents
from recipes.pocket.synthetic.recall import recall, recalls
from recipes.pocket.synthetic.words import LANGUAGES, company
from recipes.pocket.synthetic.workloads import HELD_OUT_SEED, MEASURED, WORKLOADS, prompt_text, render

SEEDS = range(300)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL_DIRECTORY)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(text_files()["chat_template.jinja"])


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_reference_answer_scores_one(name):
    for seed in SEEDS:
        example = WORKLOADS[name](Random(seed))
        scores = score(example, example.answer)
        assert "exact" in scores
        assert set(scores.values()) == {1.0}, (seed, example)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_gives_the_same_example_and_others_give_others(name):
    assert WORKLOADS[name](Random(7)) == WORKLOADS[name](Random(7))
    training = {str(WORKLOADS[name](Random(seed)).messages) for seed in SEEDS}
    held_out = {str(WORKLOADS[name](Random(HELD_OUT_SEED + seed)).messages) for seed in SEEDS}
    if name != "chat":  # greetings are few
        assert len(training) > 0.8 * len(SEEDS)
        assert len(held_out - training) > 0.8 * len(held_out)


@pytest.mark.parametrize("name", WORKLOADS)
def test_ids_are_those_of_the_whole_text_and_the_answer_starts_at_its_index(name, tokenizer, template):
    for seed in range(40):
        example = WORKLOADS[name](Random(seed))
        ids, first = render(example, tokenizer, template)
        assert tuple(ids) == tokenizer.encode(prompt_text(example, template) + example.answer + "<|im_end|>")
        assert tokenizer.decode(ids[first:]) == example.answer
        assert ids[-1:] == list(tokenizer.encode("<|im_end|>"))


@pytest.mark.parametrize("name", WORKLOADS)
def test_an_answer_is_what_the_template_writes_in_history(name, template):
    for seed in range(60):
        example = WORKLOADS[name](Random(seed))
        reasoning, _, content = example.answer.rpartition("\n</think>\n\n")
        turn = {"role": "assistant", "content": content, "reasoning_content": reasoning}
        if example.check["kind"] == "calls":
            made = [{"type": "function", "function": call} for call in example.check["calls"]]
            turn = {"role": "assistant", "content": "", "reasoning_content": reasoning, "tool_calls": made}
        messages = [*example.messages, turn, {"role": "tool", "content": "done"}]
        history = template.render(messages, {}, example.tools or ())
        assert history.startswith(prompt_text(example, template) + example.answer + "<|im_end|>")


@pytest.mark.parametrize("name", WORKLOADS)
def test_thinking_is_common_and_so_is_its_absence(name):
    thinking = sum(WORKLOADS[name](Random(seed)).thinking for seed in SEEDS)
    assert 0.05 * len(SEEDS) < thinking < 0.7 * len(SEEDS)


def test_tool_names_are_such_as_servers_accept():
    for seed in SEEDS:
        for tool in WORKLOADS["tools"](Random(seed)).tools or []:
            assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", tool["function"]["name"])


def test_arguments_follow_the_schema_of_their_tool():
    types = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list}
    for seed in SEEDS:
        example = WORKLOADS["tools"](Random(seed))
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in example.tools or []}
        for call in example.check.get("calls", []):
            schema = tools[call["name"]]
            assert set(schema["required"]) == set(call["arguments"])
            for name, value in call["arguments"].items():
                assert isinstance(value, types[schema["properties"][name]["type"]])
                assert value in schema["properties"][name].get("enum", [value])


def test_invoices_say_what_their_answer_says():
    for seed in SEEDS:
        example = WORKLOADS["invoice"](Random(seed))
        text = example.messages[-1]["content"]
        for key in ("vendor", "customer", "invoice_number", "email", "tax_id"):
            if key in example.check["value"]:
                assert example.check["value"][key] in text


def test_sums_are_right():
    for seed in SEEDS:
        example = WORKLOADS["arithmetic"](Random(seed))
        a, sign, b = re.search(r"(\d+) ?([-+*×]) ?(\d+)", example.messages[-1]["content"]).groups()
        result = {"+": int(a) + int(b), "-": int(a) - int(b)}.get(sign, int(a) * int(b))
        assert example.answer.split("\n")[-1] == str(result)
        for left, right in re.findall(r"^([-+* \d]+) = (-?\d+)", example.answer, re.MULTILINE):
            assert eval(left) == int(right)  # noqa: S307


def test_each_of_several_hidden_keys_is_told_once_and_asked_for_once():
    example = recalls(Random(4), 6_000)
    text, *_ = (message["content"] for message in example.messages)
    answers = [*(m["content"] for m in example.messages if m["role"] == "assistant"), example.answer]
    questions = [m["content"].rpartition("\n")[2] for m in example.messages if m["role"] == "user"]
    assert len(answers) == len(questions) == len(set(questions)) > 4
    assert all(f" {answer}." in text for answer in answers)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_key_stands_where_it_was_to_stand(depth):
    example = recall(Random(3), 6_000, depth)
    text = example.messages[0]["content"]
    key = example.check["values"][0]
    assert 5_000 < len(text) < 8_000
    assert abs(text.rindex(key) / len(text) - depth) < 0.15


def example(content: str, check, *, thinking: bool = False) -> Example:
    return Example.ask("?", content, check, reasoning="Hm." if thinking else "")


def test_a_wrong_field_costs_its_share():
    asked = example('{"a": 1, "b": "x"}', json_value({"a": 1, "b": "x"}))
    assert score(asked, '{"a": 1.0, "b": "x"}') == {"exact": 1.0, "valid": 1.0, "fields": 1.0}
    assert score(asked, '{"a": true, "b": "x"}') == {"exact": 0.0, "valid": 1.0, "fields": 0.5}
    assert score(asked, '{"a": 1, "b": "x", "c": 0}')["fields"] == pytest.approx(2 / 3)
    assert score(asked, '{"a": 1, "b": ') == {"exact": 0.0, "valid": 0.0, "fields": 0.0}


def test_an_answer_that_never_ends_its_thinking_is_no_answer():
    asked = example("5", text_is("5"), thinking=True)
    assert score(asked, "Hm.\n</think>\n\n5<|im_end|>") == {"exact": 1.0}
    assert score(asked, "5") == {"exact": 0.0}


def test_a_call_must_be_whole_and_right():
    asked = example("", calls(("f", {"x": 1, "y": ["a", "b"]})))
    parameters = '<parameter=x>\n1\n</parameter>\n<parameter=y>\n["a", "b"]\n</parameter>\n'
    right = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    assert score(asked, right) == {"exact": 1.0, "well_formed": 1.0, "names": 1.0}
    assert score(asked, right.replace("\n1\n", "\n2\n")) == {"exact": 0.0, "well_formed": 1.0, "names": 1.0}
    assert score(asked, right.removesuffix("</tool_call>")) == {"exact": 0.0, "well_formed": 0.0, "names": 0.0}


def test_collected_documents_become_filler_definitions_and_translations(tmp_path, monkeypatch, tokenizer):
    documents = {
        "office-en": [f"UNLIKELY{number} text.\n\nSecond paragraph." for number in range(40)],
        "wordnet-en": [f"kazoo{number}: a toy; more" for number in range(40)],
        "messages-hu": [f"English: Open {number}\nMagyar: Nyit {number}" for number in range(40)],
        "messages-tr": [f"English: Open {number}\nTürkçe: Aç {number}" for number in range(40)],
    }
    monkeypatch.setattr(filler_module, "_documents", None)
    write_token_files(
        documents, [TextSource(name, "en", "none", "text", ()) for name in documents], tokenizer._tokenizer, tmp_path
    )
    use_documents(tmp_path, tokenizer)
    assert "UNLIKELY" in str(recall(Random(0), 4_000, 0.5).messages)
    said = json.dumps([WORKLOADS["chat"](Random(seed)).messages for seed in SEEDS])
    assert "kazoo" in said
    assert "Nyit" in said or "Open" in said
    for seed in SEEDS:
        asked = WORKLOADS["chat"](Random(seed))
        assert score(asked, asked.answer) == {"exact": 1.0}


def test_the_measured_invoices_are_those_the_shipped_model_was_measured_on():
    """A changed digest means that scores before and after can no longer be compared: say so in docs/pocket.md."""
    digest = hashlib.sha256()
    for seed in range(60):
        asked = MEASURED["invoice"](Random(HELD_OUT_SEED + seed))
        digest.update(repr((asked.messages, asked.answer)).encode())
    assert digest.hexdigest()[:16] == "ed779c2251df899a"


def test_training_invoices_have_ordinary_names_too():
    names = [company(Random(seed), "en") for seed in SEEDS]
    assert names == [company(Random(seed), "en") for seed in SEEDS]
    of_words = [
        name for name in names if set(re.findall(r"[A-Z][a-z]+", name)) & {"Blue", "Golden", "Old", "Traders", "Bakery"}
    ]
    assert len(of_words) >= 5
    assert not {company(Random(seed), "en", ordinary=0.0) for seed in SEEDS} & set(of_words)


@pytest.mark.parametrize("language", LANGUAGES)
def test_companies_of_ordinary_words_are_many_and_copied_whole(language):
    names = {company(Random(seed), language, ordinary=1.0) for seed in SEEDS}
    assert len(names) > 0.9 * len(SEEDS)
    for seed in range(60):
        asked = MEASURED["invoice, ordinary names"](Random(seed))
        assert score(asked, asked.answer)["exact"] == 1.0
        if "vendor" in asked.check["value"]:
            assert asked.check["value"]["vendor"] in asked.messages[-1]["content"]
