"""Conversations on the page in a real browser: kept, changed, copied, exported, and shared by two tabs."""

import base64
import json
from pathlib import Path

import pytest
from PIL import Image
from starlette.responses import JSONResponse
from starlette.routing import Route

from onebox.engine.api import Health, HealthStatus
from onebox.server.settings import ServerSettings
from tests.server.browser import needs_chromium
from tests.server.conftest import wait_until
from tests.server.endpoints.conftest import wait_kept
from tests.server.endpoints.test_page import ANSWER, sent

pytestmark = needs_chromium
AXE = Path(__file__).parents[1] / "axe-4.14.0" / "axe.min.js"


def ask(page, text):
    count = page.run("document.querySelectorAll('.turn').length")
    page.type("#message", text)
    page.press("Enter")
    page.wait(f"document.querySelectorAll('.turn.assistant[aria-busy=false]').length * 2 >= {count + 2}")
    page.wait("!document.querySelector('#send').disabled")
    wait_kept(page, count + 2)


def click_named(page, name, where="body"):
    """The last button of that name."""
    page.run(
        f"for (const e of document.querySelectorAll('[data-test]')) delete e.dataset.test;"
        f"[...document.querySelectorAll({json.dumps(where + ' button')})]"
        f".findLast((e) => e.textContent === {json.dumps(name)}).dataset.test = 'here'"
    )
    page.click("[data-test]")


def turns(page):
    return page.run(
        "[...document.querySelectorAll('.turn')].map((e) => (e.querySelector('p, .answer') ?? e).innerText.trim())"
    )


def titles(page):
    return page.run("[...document.querySelectorAll('#list .title')].map((e) => e.textContent)")


def another_tab(browser, page, path=""):
    tab = browser.open_page()
    tab.go(page.url + path)
    tab.wait("document.querySelector('#model').textContent")
    return tab


def test_conversations_are_listed_reopened_deleted_and_brought_back(opened):
    page = opened(f"{ANSWER}Fine.")
    assert "begin with one of these" in page.text("#hints")
    page.click("#examples button")
    assert page.run("document.querySelector('#message').value").startswith("Explain how")
    page.run("document.querySelector('#message').value = ''")
    ask(page, "First?")
    assert page.run("document.querySelector('#hints').hidden")
    page.click("#new-chat")
    ask(page, "Second?")
    page.wait("document.querySelectorAll('#list li').length === 2")
    assert titles(page) == ["Second?", "First?"]
    page.click("#list li:last-child .title")
    page.wait("document.querySelector('.turn.user p')?.innerText === 'First?'")
    page.click("#list li:last-child .remove")
    page.wait("document.querySelectorAll('#list li').length === 1 && !document.querySelector('.turn')")
    click_named(page, "Undo", "#offer")
    page.wait("document.querySelectorAll('#list li').length === 2 && document.querySelectorAll('.turn').length === 2")
    page.ask("Page.reload")
    page.wait("document.querySelectorAll('.turn').length === 2 && document.querySelectorAll('#list li').length === 2")
    assert turns(page) == ["First?", "Fine."]


def test_the_pocket_model_is_introduced_and_asked_what_it_can_answer(opened):
    page = opened(ANSWER)
    page.wait("document.querySelector('#model').textContent")
    assert page.run("document.querySelector('#hint-pocket').hidden")
    page.run("import('/static/hints.js').then(({ describeModel }) => describeModel({ root: 'pocket' }))")
    assert "This is the pocket model" in page.text("#hints")
    page.click("#examples button")
    assert page.run("document.querySelector('#message').value") == "What can you do?"


def test_turns_are_edited_branched_from_and_deleted(opened):
    page = opened(f"{ANSWER}Fine.")
    ask(page, "One?")
    ask(page, "Two?")
    click_named(page, "Branch", ".turn:nth-child(2)")
    page.wait("document.querySelectorAll('.turn').length === 2 && document.querySelectorAll('#list li').length === 2")
    assert titles(page) == ["One? (branch)", "One?"]
    click_named(page, "Edit", ".turn:nth-child(2)")
    page.run("document.querySelector('.edit textarea').value = ''")
    page.type(".edit textarea", "Better.")
    click_named(page, "Save", ".edit")
    page.wait("document.querySelector('.answer')?.innerText === 'Better.'")
    ask(page, "Three?")
    assert "Better." in sent(page.client)
    assert "Two?" not in sent(page.client)
    page.click("#list li:last-child .title")
    page.wait("document.querySelector('.turn:nth-child(3) p')?.innerText === 'Two?'")
    click_named(page, "Edit", ".turn:nth-child(1)")
    page.type(".edit textarea", " Again")
    click_named(page, "Send again, without the 3 turns below", ".edit")
    page.wait("document.querySelectorAll('.turn').length === 2 && !document.querySelector('#send').disabled")
    assert turns(page) == ["One? Again", "Fine."]
    wait_kept(page, 2)
    click_named(page, "Delete", ".turn:nth-child(1)")
    page.wait("!document.querySelector('.turn')")
    click_named(page, "Undo", "#offer")
    page.wait("document.querySelectorAll('.turn').length === 2")
    click_named(page, "Delete", ".turn:nth-child(2)")
    page.wait("document.querySelectorAll('.turn').length === 1")


def test_a_refused_message_is_back_in_the_form_and_not_in_the_conversation(opened):
    page = opened(f"{ANSWER}Fine.", allowed=("400",))
    ask(page, "Hi")
    page.type("#message", "x" * 5000)
    page.press("Enter")
    page.wait("document.querySelector('#notice').textContent.includes('context holds 4000')")
    assert page.run("document.querySelector('#message').value") == "x" * 5000
    assert turns(page) == ["Hi", "Fine."]
    wait_kept(page, 2)
    # Nor does an answer go because making it again was refused.
    page.run(
        "document.querySelector('#message').value = ''; document.querySelector('#system').value = 'y'.repeat(5000)"
    )
    page.click("#regenerate")
    page.wait("document.querySelector('#notice').textContent.includes('context holds 4000')")
    page.wait("document.querySelectorAll('.turn').length === 2")
    assert turns(page) == ["Hi", "Fine."]
    # A number that is none is said before anything is sent.
    page.run("document.querySelector('#system').value = ''; document.querySelector('#top-p').value = '7'")
    page.type("#message", "And?")
    page.press("Enter")
    page.wait("document.querySelector('#notice').textContent.startsWith('Top-p: ')")
    assert page.run("document.querySelector('#message').value") == "And?"


def test_two_tabs_see_each_other_and_neither_overwrites_the_other(opened, browser):
    page = opened(f"{ANSWER}Fine.")
    ask(page, "One?")
    tab = another_tab(browser, page, page.run("location.hash"))
    tab.wait("document.querySelectorAll('.turn').length === 2")
    tab.type("#message", "Two?")
    tab.press("Enter")
    page.wait("document.querySelectorAll('.turn').length === 4")
    wait_until(lambda: turns(page) == ["One?", "Fine.", "Two?", "Fine."])  # the answer comes in pieces here too
    # While this one is edited it does not follow, and what it then saves becomes a branch.
    click_named(page, "Edit", ".turn:nth-child(2)")
    tab.wait("!document.querySelector('#send').disabled")
    tab.type("#message", "Three?")
    tab.press("Enter")
    tab.wait("document.querySelectorAll('.turn.assistant[aria-busy=false]').length === 3")
    wait_kept(tab, 6)
    page.type(".edit textarea", " Changed.")
    click_named(page, "Save", ".edit")
    page.wait("document.querySelector('#notice').textContent.includes('kept as a branch')")
    page.wait("document.querySelectorAll('#list li').length === 2")
    tab.wait("document.querySelectorAll('#list li').length === 2")
    assert sorted(titles(page)) == sorted(titles(tab)) == ["One?", "One? (branch)"]
    assert len(turns(tab)) == 6
    assert [len(turns(page)), turns(page)[1]] == [4, "Fine. Changed."]
    tab.ask("Page.close")


def test_a_full_browser_is_told_and_what_was_kept_stays(opened):
    page = opened(f"{ANSWER}Fine.")
    ask(page, "Kept?")
    page.run(
        "import('/static/shelf.js').then(async () => { const open = indexedDB.open('onebox');"
        "await new Promise((done) => open.addEventListener('success', done));"
        "const written = open.result.transaction('heads', 'readwrite');"
        "written.objectStore('heads').put({id: 'x', title: 'Large', updated: 1, revision: 1, size: 199999990});"
        "await new Promise((done) => written.addEventListener('complete', done)); })"
    )
    page.click("#new-chat")
    page.type("#message", "More?")
    page.press("Enter")
    page.wait("document.querySelector('#notice').textContent.includes('keeps 200 MB of conversations at most')")
    page.wait("document.querySelector('.answer')?.innerText === 'Fine.'")
    assert titles(page) == ["Kept?", "Large"]


@pytest.mark.parametrize("host", ["127.0.0.1", "box.lan"])
def test_text_and_code_are_copied_also_over_plain_http_from_another_machine(opened, host):
    text = "Use **this**:\n\n```py\na < b\n```"
    page = opened(f"{ANSWER}{text}", settings=ServerSettings(allowed_hosts=("box.lan",)), host=host)
    assert page.run("Boolean(navigator.clipboard)") is (host == "127.0.0.1")
    ask(page, "How?")
    for where, copied in ((".code-head", "a < b"), (".turn.assistant > .actions", text)):
        click_named(page, "Copy", where)
        page.wait(f"document.querySelector('{where} button').textContent === 'Copied'")
        page.run("document.querySelector('#message').value = ''")
        page.paste("#message")
        page.wait("document.querySelector('#message').value")
        assert page.run("document.querySelector('#message').value") == copied


def test_a_conversation_is_exported_as_markdown_and_as_the_apis_messages(opened, browser, tmp_path):
    browser.ask("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page = opened(f"{ANSWER}# Fine\n\n`x`")
    ask(page, "Größe?")
    page.click("#export-markdown")
    wait_until(lambda: (tmp_path / "gro-e.md").exists() or list(tmp_path.glob("*.md")))
    (markdown,) = tmp_path.glob("*.md")
    wait_until(lambda: markdown.stat().st_size)
    written = "# Größe?\n\n## You\n\nGröße?\n\n## Assistant\n\n> Thinking:\n>\n> I look at it.\n\n# Fine\n\n`x`\n"
    assert markdown.read_text() == written
    page.click("#export-json")
    wait_until(lambda: list(tmp_path.glob("*.json")))
    (exported,) = tmp_path.glob("*.json")
    wait_until(lambda: exported.stat().st_size)
    assert [message["content"] for message in json.loads(exported.read_text())["messages"]] == [
        "Größe?",
        "# Fine\n\n`x`",
    ]


def test_images_are_dropped_and_pasted_and_other_files_are_refused(opened, tmp_path):
    async def models(request):
        return JSONResponse({"data": [{"id": "tiny", "max_model_len": 4000, "input_modalities": ["text", "image"]}]})

    page = opened("ok", route=Route("/v1/models", models))
    page.wait("!document.querySelector('#attach').hidden")
    image, other = tmp_path / "a.png", tmp_path / "b.pdf"
    Image.new("RGB", (4, 4), "red").save(image)
    other.write_bytes(b"%PDF")
    page.drop("#hints", image)
    page.wait("document.querySelectorAll('#attached img').length === 1")
    encoded = base64.b64encode(image.read_bytes()).decode()
    assert page.run("document.querySelector('#attached img').src") == f"data:image/png;base64,{encoded}"
    page.drop("#hints", other)
    page.wait("document.querySelector('#notice').textContent.includes('b.pdf is no PNG')")
    page.run(
        f"const data = new DataTransfer(); const bytes = Uint8Array.from(atob('{encoded}'), (c) => c.charCodeAt(0));"
        "data.items.add(new File([bytes], 'c.png', {type: 'image/png'}));"
        "document.querySelector('#message').dispatchEvent("
        "new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true}))"
    )
    page.wait("document.querySelectorAll('#attached img').length === 2")
    page.click("#attached button")
    page.wait("document.querySelectorAll('#attached img').length === 1")


def test_a_stored_conversation_that_somebody_else_wrote_does_no_harm(opened):
    page = opened(f"{ANSWER}Fine.")
    evil = "<img src=/evil onerror=\"document.title='evil'\">"
    stored = [
        {"role": "user", "content": evil, "images": ["javascript:alert(1)", "/evil", "data:text/html,x", 7]},
        {"role": "assistant", "content": {"a": 1}, "reasoning": evil, "calls": "x", "figures": {"tokens": evil}},
        {"role": "assistant", "content": f"[x](javascript:alert(1)) {evil}", "calls": [None, {"name": evil}]},
        {"role": "system", "content": evil},
        None,
        "x",
    ]
    page.run(
        "(async () => { const open = indexedDB.open('onebox');"
        "await new Promise((done) => open.addEventListener('success', done));"
        "const written = open.result.transaction(['heads', 'bodies'], 'readwrite');"
        f"written.objectStore('heads').put({{id: 'e', title: {json.dumps(evil)}, updated: 'x', size: null}});"
        f"written.objectStore('bodies').put({{id: 'e', turns: {json.dumps(stored)}}});"
        "await new Promise((done) => written.addEventListener('complete', done)); })()"
    )
    page.go(page.url + "/#e")
    page.ask("Page.reload")
    page.wait("document.querySelectorAll('.turn').length === 3")
    assert page.run("document.querySelectorAll('.turn img, .turn a, #list img').length + document.title") == "0onebox"
    assert not [address for address in page.requested if "evil" in address]
    page.wait("document.querySelector('#list .title')")
    assert titles(page) == [evil]


def test_sampling_settings_reach_the_engine_and_are_reset(opened):
    page = opened(f"{ANSWER}Fine.")
    page.click("#show-settings")
    values = {"temperature": "0.25", "top-p": "0.5", "top-k": "7", "min-p": "0.125", "presence-penalty": "1.5"}
    values |= {"frequency-penalty": "-1", "repetition-penalty": "1.25", "seed": "42", "max-tokens": "99"}
    for name, value in values.items():
        page.type(f"#{name}", value)
    page.click("#show-settings")
    ask(page, "Hi")
    given = page.client.sampling[-1]
    assert (given.temperature, given.top_p, given.top_k, given.min_p) == (0.25, 0.5, 7, 0.125)
    penalties = (given.presence_penalty, given.frequency_penalty, given.repetition_penalty)
    assert (*penalties, given.seed, given.max_tokens) == (1.5, -1, 1.25, 42, 99)
    page.click("#show-settings")
    click_named(page, "Reset sampling")
    assert page.run("[...document.querySelectorAll('#settings input[type=number]')].every((e) => !e.value)")


def test_the_live_view_says_when_the_engine_is_down_and_when_it_is_back(opened):
    page = opened(f"{ANSWER}Fine.", allowed=("503",))
    engine = page.client.service.engine
    is_up, engine.health = engine.health, lambda: Health(HealthStatus.RESTARTING, "The engine died: out of memory.", 1)
    page.wait("document.querySelector('#live-problem').textContent.includes('down (restarting). The engine died: out')")
    engine.health = is_up
    page.wait("document.querySelector('#live-problem').hidden")


def test_axe_finds_nothing_serious(opened):
    text = "# A\n\n[l](https://example.org)\n\n|a|b|\n|-|-|\n|1|2|\n\n> q\n\n$x$\n\n"
    text += "```python\ndef f(): return 'x' # c\n```"
    page = opened(ANSWER + text)
    page.wait("document.querySelector('#model').textContent")
    page.run(AXE.read_text() + "; 0")
    assert serious(page) == []
    ask(page, "Hi")
    page.click("#show-settings")
    click_named(page, "Delete", ".turn:nth-child(2)")
    click_named(page, "Undo", "#offer")
    page.wait("document.querySelectorAll('.turn').length === 2")
    click_named(page, "Edit", ".turn:nth-child(1)")
    for scheme in ("light", "dark"):
        page.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        assert serious(page) == []


def serious(page):
    """Rules that are broken gravely, each with the elements."""
    found = page.run(
        "axe.run(document, {resultTypes: ['violations']}).then(({ violations }) => violations"
        ".filter(({ impact }) => ['serious', 'critical'].includes(impact))"
        ".map(({ id, nodes }) => [id, nodes.map(({ html }) => html)]))"
    )
    assert page.run("axe.version") == "4.14.0"
    return found
