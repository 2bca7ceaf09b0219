"""The page at /: how its files are served, and what a person sees of it in a real browser."""

import base64
import json
import re
import threading
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

import onebox.server
from onebox.server.keys import ApiKey
from onebox.server.settings import ServerSettings
from tests.server.browser import needs_chromium
from tests.server.conftest import Client
from tests.server.endpoints.conftest import wait_kept
from tests.server.endpoints.test_chat import WEATHER, written

STATIC = Path(onebox.server.__file__).parent / "static"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
FILES = [path for path in STATIC.rglob("*") if path.is_file() and path.name != "vendored.toml"]
OURS = [path for path in FILES if path.parent == STATIC]
EVIL = "<img src=/evil onerror=\"document.title='evil'\"><script>document.title='evil'</script>"
ANSWER = "I look at it.\n</think>\n\n"


def test_every_file_of_the_page_is_served_with_its_type(scripted):
    client = scripted("ok")
    paths = {"/": STATIC / "index.html", **{f"/static/{path.relative_to(STATIC)}": path for path in FILES}}
    assert len(FILES) - len(OURS) > 5
    for path, file in paths.items():
        response = client.request("GET", path)
        assert response.status_code == 200
        assert response.headers["content-type"].partition(";")[0] == TYPES[file.suffix]
        assert response.content == file.read_bytes()


def test_the_policy_lets_the_page_reach_its_own_server_alone(scripted):
    headers = scripted("ok").request("GET", "/").headers
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert policy.pop("default-src") == "'none'"
    assert (policy.pop("require-trusted-types-for"), policy.pop("trusted-types")) == ("'script'", "dompurify")
    sources = {source for rule in policy.values() for source in rule.split()}
    assert sources == {"'self'", "'none'", "data:"}
    assert policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")


def test_a_file_that_the_browser_has_is_not_sent_again(scripted):
    client = scripted("ok")
    first = client.request("GET", "/static/app.js")
    assert first.headers["cache-control"] == "no-cache"
    for known in (first.headers["etag"], f'"other", W/{first.headers["etag"]}'):
        again = client.request("GET", "/static/app.js", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
    changed = client.request("GET", "/static/app.js", headers={"if-none-match": '"other"'})
    assert changed.content == first.content


def test_a_library_whose_folder_names_its_version_is_asked_for_once(scripted):
    (path,) = STATIC.glob("vendor/katex-*/katex.min.js")
    response = scripted("ok").request("GET", f"/static/{path.relative_to(STATIC)}")
    assert response.headers["cache-control"] == "public, max-age=31536000, immutable"


@pytest.mark.parametrize(
    "path",
    ["nothing.js", "vendor/vendored.toml", "vendor%2f..%2fapp.js", "..%2fpage.py", "%2e%2e/page.py", "%5c..%5cpage.py"],
)
def test_only_the_pages_own_files_are_given_out(scripted, path):
    response = scripted("ok").request("GET", f"/static/{path}")
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_the_page_opens_without_the_key_and_what_it_asks_for_does_not(scripted):
    client = Client(scripted("ok").service, ServerSettings(api_keys=(ApiKey("test", "s3cret"),)))
    assert client.request("GET", "/").status_code == client.request("GET", "/static/app.js").status_code == 200
    for path in ("/v1/models", "/metrics", "/static", "/staticx"):
        assert client.request("GET", path).status_code == 401


def test_the_page_is_no_part_of_the_described_api(scripted):
    assert not {"/", "/static/{name}", "/static/{name:path}"} & scripted("ok").app.openapi()["paths"].keys()


def test_no_file_of_the_page_names_another_server():
    """Namespaces of SVG are names, not addresses."""
    for path in OURS:
        addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`]*", path.read_text())
        assert [address for address in addresses if "www.w3.org/2000/svg" not in address] == []
        assert "innerHTML" not in path.read_text()


def sent(client):
    return client.service.tokenizer.decode(client.requests[-1].prompt)


@needs_chromium
def test_the_page_of_the_api_lists_every_operation_with_its_fields(opened):
    page = opened("ok", path="/docs")
    page.wait("document.querySelectorAll('#operations details').length > 5")
    assert "POST /v1/chat/completions" in page.run("document.querySelector('#operations').textContent")
    assert "max_completion_tokens" in page.run("document.querySelector('#operations').textContent")


@needs_chromium
def test_a_conversation_shows_thinking_an_answer_and_a_tool_call_card(opened):
    text = f"{ANSWER}# Plan\n\n**Bold** and `code`, {EVIL}:\n- one\n- two\n\n```py\na < b\n```\n"
    page = opened(text + written("get_weather", city="Zürich", days=3))
    page.wait("document.querySelector('#model').textContent.startsWith('tiny')")
    page.click("#show-settings")
    page.type("#tools", json.dumps([WEATHER["function"]]))
    page.click("#show-settings")
    page.type("#message", "How is the weather?")
    page.press("Enter")
    page.wait("document.querySelector('.call form') && !document.querySelector('.call form').hidden")
    assert page.text(".turn.user p") == "How is the weather?"
    assert page.run("document.querySelector('.thinking-text').textContent").strip() == "I look at it."
    assert page.run("document.querySelector('.thinking').open") is False
    assert page.text(".answer strong") == "Bold"
    assert page.text(".answer li") == "one\ntwo"
    assert page.text(".answer pre") == "a < b"
    assert EVIL in page.text(".answer p")
    assert page.run("document.querySelectorAll('.answer :is(img, script)').length + document.title") == "0onebox"
    assert page.text(".call-name") == "get_weather"
    assert json.loads(page.text(".call-arguments")) == {"city": "Zürich", "days": 3}
    assert re.search(r"first token after [\d.]+ s · \d+ tokens", page.text(".figures"))
    page.wait("document.querySelector('#live').innerText.includes('of 200')")

    page.type(".call textarea", "sunny")
    page.click(".call button")
    page.wait("document.querySelectorAll('.turn').length === 3 && document.querySelector('#stop').hidden")
    assert "sunny" in sent(page.client)
    assert page.text(".call-result").startswith("sunny")


@needs_chromium
def test_thinking_is_open_while_it_streams_and_an_answer_can_be_stopped_and_made_again(opened):
    page = opened("I think about it" + " and on" * 300)
    runner = page.client.runner
    start, steps = runner.start, []

    def start_some(plan):
        steps.append(plan)
        if len(steps) == 40:
            runner.gate.clear()
        return start(plan)

    runner.start = start_some
    page.type("#message", "Hi")
    page.click("#send")
    page.wait("document.querySelector('.thinking-text')?.textContent.includes('about it')")
    assert page.run("document.querySelector('.thinking').open") is True
    assert page.text(".thinking summary") == "Thinking…"
    page.press("Escape")
    page.wait("document.querySelector('#stop').hidden")
    assert page.text(".figures").endswith("stopped")
    runner.gate.set()
    page.click("#show-settings")
    page.type("#max-tokens", "3")
    page.click("#show-settings")
    page.click("#regenerate")
    page.wait("document.querySelector('.figures')?.textContent.includes('length limit')")
    assert page.run("document.querySelectorAll('.turn').length") == 2
    assert page.client.sampling[-1].max_tokens == 3


@needs_chromium
def test_the_conversation_and_the_settings_outlive_the_page(opened):
    page = opened(f"{ANSWER}Fine.")
    page.click("#show-settings")
    page.type("#system", "Be kind.")
    page.click("#thinking")
    page.type("#message", "How are you?")
    page.press("Enter")
    page.wait("document.querySelector('.turn.assistant[aria-busy=false]')")
    assert "Be kind." in sent(page.client)
    assert sent(page.client).rstrip().endswith("</think>")
    wait_kept(page, 2)
    page.ask("Page.reload")
    page.wait("document.querySelectorAll('.turn').length === 2")
    assert page.run("document.querySelector('#system').value") == "Be kind."
    assert page.run("document.querySelector('#thinking').checked") is False
    page.click("#new-chat")
    page.wait("document.querySelectorAll('.turn').length === 0")
    page.ask("Page.reload")
    page.wait("document.readyState === 'complete' && document.querySelector('#model').textContent")
    assert page.run("document.querySelectorAll('.turn').length") == 0


@needs_chromium
def test_without_the_key_the_page_says_what_it_needs_and_with_it_it_works(opened):
    page = opened(f"{ANSWER}Fine.", settings=ServerSettings(api_keys=(ApiKey("test", "s3cret"),)), allowed=("401",))
    page.wait("document.querySelector('#notice').textContent.includes('API key')")
    page.wait("document.querySelector('#live-problem').textContent.includes('need the API key')")
    page.click("#show-settings")
    page.type("#api-key", "s3cret")
    page.press("Enter")
    page.wait("document.querySelector('#notice').hidden && document.querySelector('#model').textContent")
    page.type("#message", "Hi")
    page.press("Enter")
    page.wait("document.querySelector('.answer')?.innerText === 'Fine.'")


@needs_chromium
def test_events_cut_at_every_byte_join_to_the_same_answer(opened):
    said = "Grüße 🙂, 世界"

    async def chat(request):
        chunks = [{"choices": [{"delta": {"content": part}, "finish_reason": None}]} for part in said]
        events = "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        return StreamingResponse(bytes([byte]) for byte in events.encode())

    page = opened("ok", route=Route("/v1/chat/completions", chat, methods=["POST"]))
    page.type("#message", "Hi")
    page.press("Enter")
    page.wait("document.querySelector('.turn.assistant[aria-busy=false]')")
    assert page.text(".answer") == said


@needs_chromium
def test_an_answer_drawn_as_it_grows_ends_as_one_drawn_at_once(opened):
    text = "# A *b*\n1. x\n   more\n   - y\n\n   - z\n2. `a*b*`\n> q **r\n> s** t\n\n~~~\n**c**\n```\n~~~\n"
    text += "end * of * it\n```js\nf"
    other = "[r][z] $x$\n#\n#no\n\n|a|b|\n|-|-|\n|1|$x$|\n$$\ny\n$$\nt\n===\n[z]: https://example.org/\n"
    page = opened("ok")
    pairs = page.run(
        "import('/static/markdown.js').then(({ MarkdownView }) => "
        f"{json.dumps([text, other])}.map((text) => {{"
        "const [grown, whole] = [0, 0].map(() => new MarkdownView(document.createElement('div')));"
        "for (let end = 1; end <= text.length; end++) grown.show(text.slice(0, end));"
        "whole.show(text);"
        "for (const { element } of [grown, whole]) element.querySelectorAll('button').forEach((each) => each.remove());"
        "return [grown.element.innerHTML, whole.element.innerHTML]; }))"
    )
    for grown, whole in pairs:
        assert grown == whole
    assert all(part in pairs[1][0] for part in ("https://example.org/", "</td>", 'display="block"', "<h2>t</h2>"))
    whole = pairs[0][1]
    assert "".join(whole.split("\n")) == (
        "<div><h2>A <em>b</em></h2></div>"
        "<div><ol><li>x<br>more<ul><li><p>y</p></li><li><p>z</p></li></ul></li>"
        "<li><code>a*b*</code></li></ol></div>"
        "<div><blockquote><p>q <strong>r<br>s</strong> t</p></blockquote></div>"
        '<div><div class="code"><div class="code-head"><span>code</span></div>'
        '<pre tabindex="0"><code>**c**```</code></pre></div></div>'
        "<div><p>end * of * it</p></div>"
        '<div><div class="code"><div class="code-head"><span>js</span></div>'
        '<pre tabindex="0"><code>f</code></pre></div></div>'
    )


@needs_chromium
@pytest.mark.parametrize(("modalities", "is_offered"), [(["text", "image"], True), (["text"], False)])
def test_images_are_attached_where_the_server_has_vision(opened, modalities, is_offered):
    async def models(request):
        model = {"id": "tiny", "max_model_len": 4000, "input_modalities": modalities}
        return JSONResponse({"data": [model]})

    bodies = []

    async def chat(request):
        bodies.append(await request.json())
        return PlainTextResponse("data: [DONE]\n\n", media_type="text/event-stream")

    page = opened("ok", route=Route("/v1/models", models))
    page.wait("document.querySelector('#model').textContent")
    assert page.run("document.querySelector('#attach').hidden") is not is_offered
    if not is_offered:
        return
    page.client.app.router.routes.insert(0, Route("/v1/chat/completions", chat, methods=["POST"]))
    png = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
    page.run(
        "const data = new DataTransfer();"
        f"const bytes = Uint8Array.from(atob('{png}'), (c) => c.charCodeAt(0));"
        "data.items.add(new File([bytes], 'a.png', {type: 'image/png'}));"
        "const input = document.querySelector('#images'); input.files = data.files;"
        "input.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    page.wait("document.querySelectorAll('#attached img').length === 1")
    page.type("#message", "What is it?")
    page.press("Enter")
    page.wait("document.querySelectorAll('.turn.user img').length === 1")
    page.wait("document.querySelector('#stop').hidden")
    (body,) = bodies
    assert body["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png}"}},
                {"type": "text", "text": "What is it?"},
            ],
        }
    ]


def registry_of(step, *, has_disk=False):
    """Metrics of a server that makes 100 tokens between two looks, written by Prometheus' own library."""
    registry, names = CollectorRegistry(), ("model_name",)

    def counter(name, value):
        Counter(name, "", names, registry=registry).labels("tiny").inc(value)

    counter("vllm:generation_tokens", 100 * step)
    counter("vllm:prefix_cache_queries", 80)
    counter("vllm:prefix_cache_hits", 20)
    counter("vllm:spec_decode_num_drafts", 10)
    kept = Counter("vllm:spec_decode_num_accepted_tokens_per_pos", "", (*names, "position"), registry=registry)
    for place, value in enumerate((9, 4)):
        kept.labels("tiny", place).inc(value)
    Histogram("vllm:time_to_first_token_seconds", "", names, registry=registry).labels("tiny").observe(0.25)
    for name, value in {"num_requests_running": 3, "num_requests_waiting": 7, "kv_cache_usage_perc": 0.25}.items():
        Gauge(f"vllm:{name}", "", names, registry=registry).labels("tiny").set(value)
    Gauge("vllm:cache_config_info", "", ("num_gpu_blocks",), registry=registry).labels("400").set(1)
    memory = Gauge("onebox:memory_bytes", "", (*names, "part"), registry=registry)
    memory.labels("tiny", 'weights, "INT4"').set(3 << 30)
    tiers = {"memory": (6, 1000), "disk": (2, 60000)} if has_disk else {"memory": (6, 1000)}
    for place, name in enumerate(("hits", "hit_tokens")):
        family = Counter(f"onebox:prefix_tier_{name}", "", (*names, "tier"), registry=registry)
        for tier, counts in tiers.items():
            family.labels("tiny", tier).inc(counts[place])
    if has_disk:
        counter("onebox:prefix_disk_read_bytes", 1 << 30)
        counter("onebox:prefix_disk_written_bytes", 5 << 30)
        counter("onebox:prefix_disk_saved_seconds", 93.26)
        for name, value in {"bytes": 7 << 30, "writing": 0}.items():
            Gauge(f"onebox:prefix_disk_{name}", "", names, registry=registry).labels("tiny").set(value)
    return registry


@needs_chromium
def test_the_live_view_shows_what_the_metrics_say(opened):
    steps, with_disk = [], threading.Event()

    async def metrics(request):
        steps.append(request)
        return PlainTextResponse(generate_latest(registry_of(len(steps), has_disk=with_disk.is_set())))

    page = opened("ok", route=Route("/metrics", metrics))
    page.wait("document.querySelector('.figure polyline').points.length > 1")
    shown = [
        figure.split("\n")[:2]
        for figure in json.loads(
            page.run("""JSON.stringify(
        [...document.querySelectorAll('.figure:not([hidden])')].map((e) => e.innerText))""")
        )
    ]
    speed = float(dict(shown)["Tokens per second"])
    assert 0 < speed < 101  # 100 tokens between looks that are at least a second apart
    assert dict(shown[1:]) == {
        "Time to first token": "0.250 s",
        "Requests running": "3",
        "Requests waiting": "7",
        "Prefix-cache hits": "25 %",
        "KV pages used": "100 of 400",
    }
    bars = " ".join(page.text(".bars:not([hidden])").split())
    assert bars == 'Drafts accepted, by position 1 90 % 2 40 % Memory weights, "INT4" 3.00 GiB'
    with_disk.set()
    page.wait("document.querySelector('#live').innerText.includes('on disk')")
    live = " ".join(page.text("#live").split())
    assert "Cached prefixes, hits by tier memory 6, 1000 tokens disk 2, 60000 tokens" in live
    assert "Prefixes on disk 7.00 GiB, 1.00 GiB read, 5.00 GiB written, 93.3 s saved; not writing" in live


@needs_chromium
def test_on_a_phone_nothing_is_larger_than_the_screen_but_what_scrolls(opened):
    page = opened(f"{ANSWER}```\n{'x' * 300}\n```\n{'y' * 300}")
    page.ask("Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=2, mobile=True)
    page.ask("Page.reload")
    page.wait("document.querySelector('#model').textContent && document.querySelector('#live').hidden")
    page.type("#message", "Hi")
    page.click("#send")
    page.wait("document.querySelector('.turn.assistant[aria-busy=false] pre')")
    assert page.run("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]") == [360, 640]
