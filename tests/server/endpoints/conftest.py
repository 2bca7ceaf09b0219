"""A real browser with the page open."""

import pytest

from tests.server.browser import open_browser
from tests.server.conftest import Client, listening, wait_until


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def opened(scripted, browser):
    """Opens the page of a server that says `text`; afterwards nothing may have gone elsewhere or wrong."""
    pages = []

    def open_page(text, settings=None, route=None, allowed=(), path="", host="127.0.0.1", **limits):
        client = scripted(text, max_model_len=4000, num_pages=200, **limits)
        app = Client(client.service, settings).app if settings else client.app
        if route:
            app.router.routes.insert(0, route)
        server = listening(app)
        url = server.__enter__().replace("127.0.0.1", host)
        page = browser.open_page()
        page.client, page.url = client, url
        pages.append((page, url, server, allowed))
        page.go(url + path)
        return page

    yield open_page
    for page, url, server, allowed in pages:
        requested, complaints = page.requested, page.complaints
        page.ask("Page.close")
        server.__exit__(None, None, None)
        assert requested
        assert [address for address in requested if not address.startswith((f"{url}/", "data:"))] == []
        assert [entry for entry in complaints if not any(word in entry.get("text", "") for word in allowed)] == []


def wait_kept(page, num_turns):
    """Waits until the browser has stored the page's conversation with so many turns, the last one whole."""
    script = """import('/static/shelf.js').then(async ({ Shelf }) => {
        const kept = await (await Shelf.open()).read(location.hash.slice(1));
        return kept && kept.turns.length + (kept.turns.at(-1).figures?.end === '' ? 0.5 : 0); })"""
    wait_until(lambda: page.run(script) == num_turns)
