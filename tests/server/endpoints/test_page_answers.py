"""Answers on the page in a real browser: Markdown, code and formulas, and what a hostile model tries."""

import json

import pytest

from tests.server.browser import needs_chromium

pytestmark = needs_chromium

MARKDOWN = r"""
A [link](https://example.org/a) and https://bare.example/x cost $5 to $10, $x^2$ and \(\mathbb{R}\).

| left | right |
|------|------:|
| 1    | `2`   |

- one
  1. two

```python
def f(): return "x"  # c
```

$$
\begin{aligned} a &= b \\ c &= d \end{aligned}
$$

\[
\sum_{i=1}^n i
\]

$\notacommand{$ and readme.md

[ref][later] ~~old~~

[later]: https://example.org/later
"""
HOSTILE = r"""
<script>document.title = "evil"</script>
<img src=x onerror="document.title = 'evil'">
<svg onload="document.title='evil'"><style>* { display: none }</style></svg>

[a](javascript:document.title='evil') [b](JaVaScRiPt&colon;alert(1)) [c](data:text/html,<script>1</script>)
[d](vbscript:x) [e](/v1/models) [f](<javascript:alert(1)>) ![g](https://evil.example/pixel.png) ![h](/evil.png)
<javascript:alert(1)> <https://example.org/"onmouseover="document.title='evil'>

```"><img src=x onerror=alert(1)>
</code></pre><script>document.title = "evil"</script>
```

$\href{javascript:alert(1)}{x}$ $\includegraphics{/evil.png}$ $\htmlStyle{color: red}{x}$
$\htmlData{onclick=alert(1)}{x}$ $\text{</math><script>document.title="evil"</script>}$

| <b onclick=alert(1)> | [x](javascript:1) |
|--|--|
| <iframe src=/evil> | **x** |
"""
RAW = (
    "<script>document.title='evil'</script><img src=/evil onerror=alert(1)><a href='javascript:alert(1)'>a</a>"
    "<a href='/v1/models' target=_self>b</a><form action=/evil><input name=x><button>go</button></form>"
    "<p style='position:fixed' id=send onclick=alert(1)>p</p><iframe srcdoc='<script>1</script>'></iframe>"
    "<svg><script>1</script><a href='javascript:1'>s</a></svg><math><annotation-xml encoding='text/html'>"
    "<img src=/evil></annotation-xml><mi xlink:href='javascript:1'>m</mi></math>"
    "<style>*{display:none}</style><base href=//evil>"
    "<meta http-equiv=refresh content=0><noscript><p title='</noscript><img src=/evil onerror=alert(1)>'></noscript>"
)


@pytest.fixture(scope="module")
def page(make_service, tokenizer, browser):
    """One page for all: each test draws a text in an answer of its own."""
    from onebox.server.app import create_app
    from tests.engine.scripted import ScriptedRunner
    from tests.server.conftest import listening

    service = make_service(ScriptedRunner(tokenizer.encode("ok<|im_end|>"), None))
    with listening(create_app(service)) as url:
        page = browser.open_page()
        page.go(url)
        page.wait("document.querySelector('#model').textContent")
        page.url = url
        yield page
        requested, complaints = page.requested, page.complaints
        page.ask("Page.close")
    service.engine.close()
    assert [address for address in requested if not address.startswith(f"{url}/")] == []
    assert not [address for address in requested if "evil" in address]
    # What the policy refuses where a test goes around the first wall or the second.
    assert [entry for entry in complaints if entry.get("source") != "security"] == []


def draw(page, text, script):
    """Draws the text as an answer and gives the script's value; `answer` is the element, `$` and `$$` search in it."""
    return page.run(
        "import('/static/markdown.js').then(({ MarkdownView, cleaned }) => {"
        "const answer = document.createElement('div'); answer.className = 'answer';"
        "document.querySelector('#turns').replaceChildren(answer);"
        "const $ = (what) => answer.querySelector(what), $$ = (what) => [...answer.querySelectorAll(what)];"
        f"const text = {json.dumps(text)}; new MarkdownView(answer).show(text);"
        f"return {script}; }})"
    )


def test_an_answer_is_drawn_as_markdown_with_code_and_formulas(page):
    assert draw(page, MARKDOWN, "$$('a').map((a) => [a.textContent, a.href, a.rel, a.target])") == [
        [text, f"https://{address}", "noopener noreferrer nofollow", "_blank"]
        for text, address in (
            ("link", "example.org/a"),
            ("https://bare.example/x", "bare.example/x"),
            ("ref", "example.org/later"),
        )
    ]
    assert draw(page, MARKDOWN, "$$('th, td').map((e) => [e.innerText, getComputedStyle(e).textAlign])") == [
        ["left", "left"],
        ["right", "right"],
        ["1", "left"],
        ["2", "right"],
    ]
    assert draw(page, MARKDOWN, "$('ul > li > ol > li').innerText") == "two"
    assert draw(page, MARKDOWN, "$$('pre span').map((e) => e.className + ' ' + e.textContent)") == [
        "hljs-keyword def",
        "hljs-title function_ f",
        "hljs-keyword return",
        'hljs-string "x"',
        "hljs-comment # c",
    ]
    maths = draw(page, MARKDOWN, "$$('math').map((m) => [m.getAttribute('display'), m.textContent])")
    assert maths == [[None, "x2"], [None, "ℝ"], ["block", "a=bc=d"], ["block", "∑i=1ni"]]
    # As tall as what they hold: the formulas are laid out, not only there.
    assert draw(page, MARKDOWN, "$$('math').every((m) => m.getBoundingClientRect().height > 8)")
    said = draw(page, MARKDOWN, "answer.innerText")
    assert "cost $5 to $10, " in said
    assert "\n\\notacommand{ and readme.md" in said


@pytest.mark.parametrize(
    "text", [HOSTILE, HOSTILE.replace("\n", "\r\n"), f"> {HOSTILE}", HOSTILE.replace("\n", "\n\n")]
)
def test_nothing_that_a_model_writes_runs_loads_or_leads_to_a_script(page, text):
    before = page.complaints
    found = draw(
        page,
        text,
        "[document.title, $$('*').map((e) => e.localName), $$('[href]').map((a) => a.getAttribute('href')),"
        "$$('*').flatMap((e) => [...e.attributes].map((a) => a.name))]",
    )
    title, tags, links, attributes = found
    assert title == "onebox"
    forbidden = {"script", "img", "svg", "style", "iframe", "form", "input", "b", "maction", "annotation"}
    assert not forbidden & set(tags)
    assert [link for link in links if not link.startswith("https://")] == []
    assert not {name for name in attributes if name.startswith("on") or name in ("style", "id", "src", "srcdoc")}
    assert page.complaints == before
    # It is not lost either: a person sees what was written.
    assert "<script>" in draw(page, text, "answer.innerText")


def test_what_markdown_would_let_through_is_removed_and_the_policy_stands_behind_it(page):
    left = draw(page, "", f"(() => {{ answer.append(cleaned({json.dumps(RAW)})); return answer.innerHTML; }})()")
    for word in ("script", "evil", "onerror", "onclick", "style", "id=", "<form", "<input", "<button", "iframe"):
        assert word not in left
    assert 'href="/v1/models"' not in left
    assert page.run("document.title") == "onebox"
    # Without DOMPurify, text does not become HTML at all.
    refused = page.run("(() => { try { document.body.innerHTML += '<p>x'; } catch (error) { return error.name; } })()")
    assert refused == "TypeError"


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("x" * 1_000_000, "$('.unparsed').textContent.length === 1e6"),
        ("word *a* " * 120_000, "$('.unparsed') !== null"),
        ("a *b*\n\n" * 2_000, "$$('em').length === 2000"),
        ("[" * 50_000 + "](" * 20_000, "answer.textContent.length > 80000"),
        ("> " * 30_000 + "x", "answer.textContent.includes('x')"),
        ("$" * 40_000 + "$x$", "answer.textContent.length > 0"),
        ("\\(" * 20_000, "answer.textContent.length > 0"),
        ("$\\def\\a{\\a\\a}\\a$ $" + "{" * 3000 + "$", "$$('code').length === 2"),
        ("```python\n" + "x = 1\n" * 40_000 + "```", "$('pre').textContent.split('\\n').length === 40000"),
        ("|a" * 2000 + "|\n" + "|-" * 2000 + "|\n" + "|x" * 2000 + "|\n", "$$('td').length === 2000"),
    ],
)
def test_a_huge_or_twisted_answer_neither_hangs_nor_breaks_the_page(page, text, script):
    assert draw(page, text, script)
    assert page.run("document.querySelector('#send').innerText") == "Send"
