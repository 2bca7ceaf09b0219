"""Debian's Chromium without a window, driven over the DevTools protocol through a pair of pipes: no driver, no library.

Chromium reads commands from its file descriptor 3 and writes answers and events to 4, each as JSON and a zero byte.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import time

import pytest

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="NOT RUN: the page was not tested, there is no browser; apt-get install chromium"
)
LIMIT_S = 120
"""Only so that a defect does not wait for ever."""
_FLAGS = (
    *("--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--window-size=1200,900"),
    # Nothing is reached but this machine, which has a name too: over plain http under a name, a page is not trusted.
    "--host-resolver-rules=MAP box.lan 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


@contextlib.contextmanager
def open_browser(directory):
    """A browser with a profile of its own in `directory`."""
    to_browser, from_browser = os.pipe(), os.pipe()
    # Above 9, so that neither is overwritten when they become 3 and 4.
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_browser[0], from_browser[1])]
    moves = [(os.POSIX_SPAWN_DUP2, end, place) for place, end in enumerate(theirs, 3)]
    quiet = [(os.POSIX_SPAWN_OPEN, place, os.devnull, os.O_RDWR, 0) for place in (0, 1, 2)]
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={directory}", "about:blank"]
    process = os.posix_spawn(CHROMIUM, command, os.environ, file_actions=[*quiet, *moves])
    for end in (to_browser[0], from_browser[1], *theirs):
        os.close(end)
    browser = Browser(from_browser[0], to_browser[1])
    try:
        yield browser
    finally:
        browser.close()
        os.waitpid(process, 0)


class Browser:
    """The connection. Events are kept as they come."""

    def __init__(self, reads, writes):
        self._reads, self._writes = reads, writes
        self._held = b""
        self._last_id = 0
        self.events = []

    def ask(self, method, session=None, **params):
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def open_page(self):
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        return Page(self, self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])

    def close(self):
        self.ask("Browser.close")
        os.close(self._reads)
        os.close(self._writes)

    def _next(self):
        while b"\0" not in self._held:
            assert select.select([self._reads], [], [], LIMIT_S)[0], "the browser says nothing"
            part = os.read(self._reads, 1 << 16)
            assert part, "the browser is gone"
            self._held += part
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)


class Page:
    """One tab: what a person does, what can be seen, and what it asked for and complained of."""

    def __init__(self, browser, session):
        self._browser, self._session = browser, session
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **params):
        return self._browser.ask(method, self._session, **params)

    def go(self, url):
        self.ask("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script):
        """The value of a script, awaited where it is a promise."""
        answer = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script):
        """Waits until the script's value is true."""
        limit = time.monotonic() + LIMIT_S
        while True:
            # Going to another address takes the old page's world away in between.
            with contextlib.suppress(AssertionError):
                if self.run(f"Boolean({script})"):
                    return
            assert time.monotonic() < limit, f"never true: {script}\nthe page says: {self.text('body')}"
            time.sleep(0.02)

    def text(self, selector):
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.innerText).join('\\n')")

    def click(self, selector):
        """With the mouse, at the element's middle, as a person does: what is covered or hidden is not reached."""
        middle = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'nearest'});"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2, r.width]; })()"
        )
        assert middle[2], f"{selector} cannot be seen"
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=middle[0], y=middle[1], button="left", clickCount=1)

    def type(self, selector, text):
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.ask("Input.insertText", text=text)

    def paste(self, selector):
        """What the clipboard holds, as Ctrl-V does."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.ask("Input.dispatchKeyEvent", type="keyDown", key="v", code="KeyV", modifiers=2, commands=["paste"])
        self.ask("Input.dispatchKeyEvent", type="keyUp", key="v", code="KeyV", modifiers=2)

    def drop(self, selector, *paths):
        """Files dragged from outside onto the element."""
        place = self.run(
            f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        data = {"items": [], "files": [str(path) for path in paths], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.ask("Input.dispatchDragEvent", type=kind, x=place[0], y=place[1], data=data)

    def press(self, key):
        code = {"Enter": 13, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    @property
    def requested(self):
        """Every address that the page asked for, whatever came of it."""
        return [event["request"]["url"] for event in self._events("Network.requestWillBeSent")]

    @property
    def complaints(self):
        """Errors and warnings of the console, exceptions, and what the policy forbade."""
        logged = [e["entry"] for e in self._events("Log.entryAdded") if e["entry"]["level"] in ("error", "warning")]
        said = [e for e in self._events("Runtime.consoleAPICalled") if e["type"] in ("error", "warning", "assert")]
        return [*logged, *said, *self._events("Runtime.exceptionThrown")]

    def _events(self, method):
        self.run("0")  # what has happened by now is before the answer
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        return [event["params"] for event in mine if event["method"] == method]
