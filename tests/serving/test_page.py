"""The web page in a real browser: Debian's Chromium, driven by its WebDriver."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support.fake_network import FakeNetwork
from tests.support.live_server import SECONDS, Live, wait_for

pytest_plugins = ["tests.support.live_fixtures"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="no chromium with chromium-driver here",
    ),
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key in the WebDriver standard


DESKTOP, PHONE = 1000, 360  # widths in CSS pixels
LOOKS = [
    pytest.param(width, scheme, id=f"{width}-{scheme}")
    for width in (DESKTOP, PHONE)
    for scheme in ("light", "dark")
]


class Browser:
    """A WebDriver session with the few commands that the tests use."""

    def __init__(self, url: str, folder: str):
        self.http = httpx.Client(base_url=url, timeout=SECONDS)
        arguments = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        arguments += ["--window-size=1000,800", f"--user-data-dir={folder}"]
        options = {
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        answer = self.http.post("/session", json={"capabilities": {"alwaysMatch": options}})
        answer.raise_for_status()
        self.http.base_url = f"{url}/session/{answer.json()['value']['sessionId']}/"

    def open(self, url: str, width: int = DESKTOP, scheme: str = "light") -> None:
        """Open a page in a window or on a phone of the given width."""
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width == PHONE}
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.do("goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=metrics)
        self.do("goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params=media)
        self.do("url", url=url)

    def do(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def run(self, script: str, *arguments: Any) -> Any:
        return self.do("execute/sync", script=script, args=list(arguments))

    def element(self, css: str) -> str:
        return self.do("element", using="css selector", value=css)[ELEMENT]

    def type(self, css: str, text: str) -> None:
        element = self.element(css)
        self.do(f"element/{element}/clear")
        self.do(f"element/{element}/value", text=text)

    def click(self, css: str) -> None:
        self.do(f"element/{self.element(css)}/click")

    def text(self, css: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", css)

    def shown(self, css: str) -> bool:
        return self.run("return document.querySelector(arguments[0]).checkVisibility()", css)

    def point_at(self, css: str) -> None:
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0}
        origin = {ELEMENT: self.element(css)}
        mouse = {"type": "pointer", "id": "mouse", "actions": [move | {"origin": origin}]}
        self.do("actions", actions=[mouse])

    def press(self, *keys: str) -> None:
        """Press keys together; the last one is released first."""
        actions = [{"type": "keyDown", "value": key} for key in keys]
        actions += [{"type": "keyUp", "value": key} for key in reversed(keys)]
        self.do("actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def screenshot(self) -> bytes:
        return base64.b64decode(self.http.get("screenshot").json()["value"])

    def errors(self) -> list[str]:
        """Return what was logged since the last call, such as violations of the page's policy."""
        return [entry["message"] for entry in self.do("se/log", type="browser")]

    def generate(self, prompt: str, **settings: Any) -> None:
        """Fill in the form and click on Generate."""
        self.type("#prompt", prompt)
        if not self.shown("#max_tokens"):
            self.click("#settings summary")
        for name, value in settings.items():
            self.type(f"#{name}", str(value))
        self.click("#go")

    def wait_for_status(self, text: str) -> None:
        wait_for(lambda: text in self.text("#status"))


CONTROL, ENTER, ESCAPE, RIGHT, LEFT = "\ue009", "\ue007", "\ue00c", "\ue014", "\ue012"


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        lines = iter(driver.stdout or ())
        port = next(match[1] for line in lines if (match := re.search(r"on port (\d+)\.", line)))
        folder = tmp_path_factory.mktemp("profile")
        browser = Browser(f"http://127.0.0.1:{port}", str(folder))
        yield browser
        browser.http.delete(str(browser.http.base_url).rstrip("/"))  # ends the browser
        browser.http.close()
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.communicate(timeout=SECONDS)


@pytest.fixture
def page(browser) -> Iterator[Browser]:
    browser.errors()
    yield browser
    browser.run("try { localStorage.clear() } catch {}")  # about:blank has none
    browser.do("url", url="about:blank")  # ends requests that are still running


@pytest.fixture
def held(serve) -> Callable[..., Live]:
    """Start a server whose network waits in its second decode call until `allowed` is set."""

    def start(**options: Any) -> Live:
        live = serve(**options)
        call, held = live.network.call, threading.Event()

        def second_decode_waits(*what):
            if ("decode", 4) in live.network.calls and not held.is_set():
                held.set()
                live.network.allowed.clear()
            call(*what)

        live.network.call = second_decode_waits
        return live

    return start


# Text.


def test_answer_to_a_typed_prompt_streams_in(live, page, tmp_path):
    page.open(live.url)
    wait_for(lambda: page.text("#model") == "fake")
    page.run(
        "window.seen = []; new MutationObserver(() => "
        "seen.push(document.getElementById('answer').textContent)"
        ").observe(document.getElementById('answer'), {childList: true, subtree: true})"
    )
    page.generate("Hello", max_tokens=60, seed=3)
    page.wait_for_status("60 tokens in")
    expected = "Hello" + live.text([15496], 3, 60)
    assert page.text("#answer") == expected
    seen = page.run("return window.seen")
    assert len(set(seen)) > 5
    assert all(expected.startswith(part) for part in seen)
    assert page.run("return document.querySelectorAll('#answer .token').length") > 20

    page.point_at("#answer .token:nth-of-type(3)")
    wait_for(lambda: page.shown("#likely"))
    assert page.text("#likely").count("%") >= 5
    image = page.screenshot()
    assert image.startswith(b"\x89PNG")
    (tmp_path / "page.png").write_bytes(image)
    assert page.errors() == []


def test_stop_sequence_ends_the_answer(live, page):
    page.open(live.url)
    page.generate("Hello", max_tokens=40, seed=0, stop="upon")
    page.wait_for_status("tokens in")
    assert page.text("#answer") == "Hello" + live.text([15496], 0, 40).partition("upon")[0]


def test_errors_are_shown_as_the_server_words_them(live, page):
    page.open(live.url)
    page.generate("Hello", top_p=1.5)
    page.wait_for_status("top_p: found 1.5, expected a number from 0 to 1")
    page.generate("Hello " * 100, top_p=1)
    page.wait_for_status("prompt: 101 tokens, but the model's context is 64 tokens")
    page.generate("Hello")
    page.wait_for_status("tokens in")


# Stopping and the keyboard.


@pytest.mark.parametrize("way", ["button", "escape", "leave"])
def test_stop_cancels_the_request_on_the_server(held, page, monkeypatch, way):
    live, cancelled = held(), threading.Event()
    cancel = live.engine.cancel

    def watched(request):
        cancel(request)
        cancelled.set()

    monkeypatch.setattr(live.engine, "cancel", watched)
    page.open(live.url)
    page.generate("Hello", max_tokens=500, seed=0)
    wait_for(lambda: live.network.waits)
    page.wait_for_status("5 tokens …")  # all of them are shown
    assert not cancelled.is_set()
    shown = page.text("#answer")
    if way == "leave":
        page.do("url", url="about:blank")
    elif way == "escape":
        page.press(ESCAPE)
    else:
        page.click("#end")
    assert cancelled.wait(SECONDS)
    live.network.allowed.set()
    wait_for(lambda: live.engine.active == 0)
    assert live.network.calls.count(("decode", 4)) <= 2  # of 125
    if way != "leave":
        page.wait_for_status("stopped after 5 tokens")
        assert page.text("#answer") == shown
        assert not page.shown("#end")
        page.generate("Hello", max_tokens=5)
        page.wait_for_status("5 tokens in")


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_keys_generate_and_move_between_tokens(live, page, width):
    page.open(live.url, width)
    assert page.shown(".hints") == (width == DESKTOP)
    page.type("#prompt", "Hello")
    page.press(CONTROL, ENTER)
    page.wait_for_status("tokens in")
    page.run("document.querySelector('#answer .token').focus()")
    focused = (
        "return [...document.querySelectorAll('#answer .token')].indexOf(document.activeElement)"
    )
    for key, index in [(LEFT, 0), (RIGHT, 1), (RIGHT, 2), (LEFT, 1)]:
        page.press(key)
        assert page.run(focused) == index
        assert page.run(OPEN_TOKEN) == index
    tabbable = "return document.querySelectorAll('#answer [tabindex=\"0\"]').length"
    assert page.run(tabbable) == 1
    page.press(ESCAPE)
    assert not page.shown("#likely")


# Alternatives of a token.

# The index of the token whose alternatives are shown, or null.  It is checked that the popup is
# that token's.
OPEN_TOKEN = """
    const tokens = [...document.querySelectorAll('#answer .token')];
    const open = tokens.filter(token => token.classList.contains('open'));
    const popup = document.getElementById('likely');
    if (popup.hidden !== (open.length === 0) || open.length > 1) return 'inconsistent';
    if (popup.hidden) return null;
    const own = [...popup.querySelectorAll('.own td:first-child')].map(cell => cell.textContent);
    const expected = open[0].likely.map(each => JSON.stringify(each.token).slice(1, -1));
    if (own.join() !== expected.join().replaceAll(' ', '␣')) return 'stale';
    return tokens.indexOf(open[0]);
"""


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_alternatives_never_stay_over_other_text(held, page, width):
    live = held()
    live.network.allowed.set()
    page.open(live.url, width)
    page.generate("Hello", max_tokens=5, seed=0)
    page.wait_for_status("5 tokens in")
    select = "document.querySelectorAll('#answer .token')[arguments[0]].focus()"

    page.run(select, 1)
    assert page.run(OPEN_TOKEN) == 1
    page.run("document.activeElement.blur()")
    assert page.run(OPEN_TOKEN) is None
    page.run(select, 2)
    page.run("dispatchEvent(new Event('resize'))")
    assert page.run(OPEN_TOKEN) is None
    page.point_at("#answer .token:nth-of-type(3)")
    wait_for(lambda: page.run(OPEN_TOKEN) == 1)
    page.point_at("#status")
    wait_for(lambda: page.run(OPEN_TOKEN) is None)

    # After a tap, no event says that the token disappears, as it has neither mouse nor focus.
    page.run("document.activeElement.blur()")
    tap = "dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
    page.run(f"document.querySelectorAll('#answer .token')[1].{tap}")
    assert page.run(OPEN_TOKEN) == 1
    live.network.allowed.clear()
    page.press(CONTROL, ENTER)
    wait_for(lambda: live.network.waits)
    assert page.text("#answer") == "Hello"
    assert page.run(OPEN_TOKEN) is None
    live.network.allowed.set()
    page.wait_for_status("5 tokens in")
    assert page.run(OPEN_TOKEN) in (None, *range(5))


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_alternatives_of_every_token_are_inside_the_window(live, page, width, scheme):
    page.open(live.url, width, scheme)
    page.generate("Hello", max_tokens=60, seed=1)
    page.wait_for_status("60 tokens in")
    boxes = page.run(
        "return [...document.querySelectorAll('#answer .token')].map(token => {"
        "  token.focus();"
        "  const box = document.getElementById('likely').getBoundingClientRect();"
        "  const at = token.getClientRects()[0];"
        "  return [box.left, box.right, box.bottom <= at.top || box.top >= at.bottom];"
        "})"
    )
    assert len(boxes) > 20
    for left, right, beside in boxes:
        assert left >= 0
        assert right <= width
        assert beside  # not over its own token


# Conversations.

TEMPLATE = """\
{%- for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
MESSAGES = """
    return [...document.querySelectorAll('#talk li')].map(item => [
        item.className, item.lastElementChild.textContent])"""


@pytest.fixture(scope="module")
def chat(held_template, serve) -> Live:
    return serve(template=held_template, sampling={"temp": 0.6, "top_k": 20})


@pytest.fixture(scope="module")
def held_template(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


def answer_to(live: Live, rendered: str, seed: int, length: int) -> str:
    return live.text(live.tokenizer(rendered)["input_ids"], seed, length)


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_a_chat_has_turns_and_a_system_message(chat, page, width):
    page.open(chat.url, width)
    wait_for(lambda: page.shown("#talk"))
    assert not page.shown("#answer")
    page.click("#settings summary")
    values = "return arguments[0].map(id => document.getElementById(id).value)"
    assert page.run(values, ["temperature", "top_p", "top_k", "min_p"]) == ["0.6", "1", "20", "0"]
    for name, value in {"system": "S", "seed": "3", "max_tokens": "9"}.items():
        page.type(f"#{name}", value)
    rendered, expected = "<system>S", []
    for question in ("Hello", "Who?"):
        page.type("#prompt", question)
        page.press(ENTER) if width == DESKTOP else page.click("#go")
        page.wait_for_status("9 tokens in")
        rendered += f"<user>{question}<assistant>"
        answer = answer_to(chat, rendered, 3, 9)
        rendered += answer
        expected += [["user", question], ["assistant", answer]]
        assert page.run(MESSAGES) == expected
        assert page.run(values, ["prompt"]) == [""]
        page.run("document.getElementById('status').textContent = ''")
    used = len(chat.tokenizer(rendered.removesuffix(answer))["input_ids"]) + 9
    assert page.text("#used").startswith(f"Context: {used} of 64 tokens")
    page.click("#new")
    assert page.run(MESSAGES) == []
    page.type("#prompt", "Hello")
    page.click("#go")
    page.wait_for_status("9 tokens in")
    assert page.run(MESSAGES) == expected[:2]
    assert page.errors() == []


def test_a_model_that_chats_still_completes(chat, page):
    page.open(chat.url)
    wait_for(lambda: page.shown("#modes"))
    page.click("#to_text")
    assert not page.shown("#talk")
    page.generate("Hello", max_tokens=9, seed=3)
    page.wait_for_status("9 tokens in")
    assert page.text("#answer") == "Hello" + chat.text([15496], 3, 9)
    page.click("#to_chat")
    assert page.shown("#talk")


def test_a_model_without_a_template_has_no_chat(live, page):
    page.open(live.url)
    wait_for(lambda: page.text("#model") == "fake")
    assert not page.shown("#modes")
    assert not page.shown("#talk")


def test_a_turn_that_fails_is_taken_back(chat, page):
    page.open(chat.url)
    wait_for(lambda: page.shown("#talk"))
    page.type("#prompt", "Hello " * 100)
    page.click("#go")
    page.wait_for_status("but the model's context is 64 tokens")
    assert page.run(MESSAGES) == []
    assert page.run("return document.getElementById('prompt').value") == "Hello " * 100
    page.type("#prompt", " ")
    page.click("#go")
    page.wait_for_status("type a message")
    page.type("#prompt", "Hello")
    page.click("#go")
    page.wait_for_status("tokens in")
    assert [role for role, _ in page.run(MESSAGES)] == ["user", "assistant"]


TITLES = """
    return [...document.querySelectorAll('#conversations .title')].map(item => item.textContent)"""


def test_conversations_are_kept_exported_and_deleted(chat, page, tmp_path):
    def ask(question: str) -> None:
        page.run("document.getElementById('status').textContent = ''")
        page.type("#prompt", question)
        page.click("#go")
        page.wait_for_status("9 tokens in")

    page.open(chat.url)
    wait_for(lambda: page.shown("#talk"))
    assert not page.shown("#kept")
    page.click("#settings summary")
    for name, value in {"system": "S", "seed": "3", "max_tokens": "9"}.items():
        page.type(f"#{name}", value)
    ask("Hello <b>")
    ask("Who?")
    first = page.run(MESSAGES)
    page.click("#new")
    page.type("#system", "")
    ask("What?")
    second = page.run(MESSAGES)

    page.open(chat.url)  # as after a restart of the browser
    wait_for(lambda: page.shown("#kept"))
    assert page.run(MESSAGES) == []
    page.click("#kept summary")
    assert page.run(TITLES) == ["What?", "Hello <b>"]
    page.click("#conversations li:nth-child(2) .title")
    assert page.run(MESSAGES) == first
    assert page.run("return document.getElementById('system').value") == "S"
    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.do("goog/cdp/execute", cmd="Browser.setDownloadBehavior", params=where)
    for kind in ("jsonl", "markdown"):
        page.click(f"#as_{kind}")
    names = ("conversations.jsonl", "conversations.md")
    wait_for(lambda: all((tmp_path / name).exists() for name in names))
    rows = [json.loads(line) for line in (tmp_path / names[0]).read_text().splitlines()]
    messages = [[{"role": role, "content": text} for role, text in own] for own in (second, first)]
    messages[1].insert(0, {"role": "system", "content": "S"})
    assert rows == [{"model": "fake", "messages": own} for own in messages]
    text = (tmp_path / names[1]).read_text()
    assert text.startswith(
        f"# What?\n\n**You:**\n\nWhat?\n\n**fake:**\n\n{second[1][1]}\n\n# Hello <b>"
    )

    for name, value in {"seed": "3", "max_tokens": "9"}.items():
        page.click("#settings summary") if not page.shown("#seed") else None
        page.type(f"#{name}", value)
    ask("And?")  # continues the first one, which is then the newest
    assert page.run(TITLES) == ["Hello <b>", "What?"]
    rendered = "<system>S" + "".join(f"<{role}>{text}" for role, text in first)
    answer = answer_to(chat, f"{rendered}<user>And?<assistant>", 3, 9)
    assert page.run(MESSAGES) == [*first, ["user", "And?"], ["assistant", answer]]
    page.click("#conversations li:nth-child(2) [aria-label]")
    assert page.run(TITLES) == ["Hello <b>"]
    assert page.run(MESSAGES)[:4] == first  # another one was deleted
    page.click("#delete_all")
    page.do("alert/accept")
    assert not page.shown("#kept")
    assert page.run(MESSAGES) == []
    assert page.errors() == []


def test_the_newest_text_is_in_view(chat, live, page):
    at_end = "return document.documentElement.scrollHeight - innerHeight - scrollY < 2"
    page.open(chat.url, PHONE)
    wait_for(lambda: page.shown("#talk"))
    page.run("document.getElementById('talk').style.paddingTop = '2000px'")
    page.type("#prompt", "Hello")
    page.click("#go")
    page.wait_for_status("tokens in")
    assert page.run(at_end)
    assert page.shown("#talk .assistant")
    assert not page.shown("#max_tokens")  # the settings are folded
    page.open(live.url, DESKTOP)
    wait_for(lambda: page.text("#model") == "fake")
    assert not page.shown("#max_tokens")
    page.run("document.getElementById('answer').style.paddingTop = '2000px'")
    page.generate("Hello", max_tokens=60, seed=3)
    page.wait_for_status("60 tokens in")
    assert page.run(at_end)


def test_a_stopped_answer_stays_in_the_conversation(held, held_template, page):
    live = held(template=held_template)
    page.open(live.url)
    wait_for(lambda: page.shown("#talk"))
    page.click("#settings summary")
    page.type("#seed", "3")
    page.type("#prompt", "Hello")
    page.click("#go")
    wait_for(lambda: live.network.waits)
    page.wait_for_status("5 tokens …")
    begun = page.run(MESSAGES)[1][1]
    assert not page.run(
        "return document.getElementById('new').checkVisibility({disabled: true}) && "
        "!document.getElementById('new').disabled"
    )
    page.press(ESCAPE)
    page.wait_for_status("stopped after 5 tokens")
    live.network.allowed.set()
    page.type("#max_tokens", "5")
    page.type("#prompt", "More")
    page.click("#go")
    page.wait_for_status("5 tokens in")
    rendered = f"<user>Hello<assistant>{begun}<user>More<assistant>"
    assert page.run(MESSAGES)[-1] == ["assistant", answer_to(live, rendered, 3, 5)]


def test_reasoning_is_shown_apart(tokenizer, page, tmp_path):
    (tmp_path / "template.jinja").write_text(
        TEMPLATE + "{% if enable_thinking is false %}<think></think>{% endif %}"
    )
    script = tokenizer("<think>\nIs it so?\n</think>\n\nYes.<|endoftext|>")["input_ids"]
    live = Live(FakeNetwork(script), tokenizer, None, template=str(tmp_path / "template.jinja"))
    seed = -len(tokenizer("<user>Hello<assistant>")["input_ids"]) % len(script)
    try:
        page.open(live.url)
        wait_for(lambda: page.shown("#talk"))
        page.click("#settings summary")
        page.type("#seed", str(seed))
        page.type("#prompt", "Hello")
        page.click("#go")
        page.wait_for_status("tokens in")
        assert page.run(MESSAGES)[1] == ["assistant", "Yes."]
        assert page.text("#talk .assistant div") == "Is it so?"
        assert not page.shown("#talk .assistant div")  # folded, as the content has begun
        page.click("#talk .assistant summary")
        assert page.shown("#talk .assistant div")
        page.click("#new")
        page.run("document.getElementById('thinking').value = 'off'")
        page.type("#prompt", "Hello")
        page.click("#go")
        page.wait_for_status("tokens in")
        tokens = len(tokenizer("<user>Hello<assistant><think></think>")["input_ids"])
        wait_for(lambda: f'"prompt_tokens": {tokens}' in live.log.getvalue())
    finally:
        live.close()


# What is shown besides the text.


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_legend_explains_the_shades_of_the_tokens(live, page, width, scheme):
    page.open(live.url, width, scheme)
    page.generate("Hello", max_tokens=20, seed=1)
    page.wait_for_status("20 tokens in")
    shades = """
        return [...document.querySelectorAll(arguments[0])].map(token => {
            const color = getComputedStyle(token).backgroundColor.match(/[\\d.]+/g).map(Number);
            const own = token.likely && Math.exp(token.likely[0].own);
            return [own ?? parseFloat(token.textContent) / 100, color[3] ?? 1];
        })"""
    legend = page.run(shades, "#legend .token")
    assert [p for p, _ in legend] == [1, 0.75, 0.5, 0.25, 0]
    strongest = legend[-1][1]
    assert strongest > 0.3
    tokens = page.run(shades, "#answer .token")
    assert len({alpha for _, alpha in tokens}) > 3
    for p, alpha in legend + tokens:
        # Colours have 8 bits, and the page rounds probabilities to 3 digits.
        assert alpha == pytest.approx((1 - p) * strongest, abs=0.006)


def test_context_shows_the_tokens_used(live, page):
    page.open(live.url)
    bar = "const bar = document.getElementById('bar'); return [bar.value, bar.max]"
    wait_for(lambda: page.text("#used") == "Context: 64 tokens")
    for length, text, value in [
        (20, "Context: 21 of 64 tokens", 21),
        (63, "Context: 64 of 64 tokens", 64),
        (80, "Context: 81 of 64 tokens, the first 17 forgotten", 64),
    ]:
        page.generate("Hello", max_tokens=length)
        wait_for(lambda text=text: page.text("#used") == text)
        assert page.run(bar) == [value, 64]


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_key_is_asked_for_only_if_the_server_has_keys(live, serve, page, tmp_path, width):
    page.open(live.url, width)
    wait_for(lambda: page.text("#model") == "fake")
    assert not page.shown("#key")
    assert page.errors() == []
    (tmp_path / "keys").write_text("right\n")
    page.open(serve(keys=str(tmp_path / "keys")).url, width)
    wait_for(lambda: page.shown("#key"))
    assert page.text("#status") == ""
    assert not page.shown("#context")
    page.generate("Hello")
    page.wait_for_status("missing or invalid API key")
    page.type("#key", "wrong")
    page.click("#go")
    page.wait_for_status("missing or invalid API key")
    page.type("#key", "right")
    page.click("#go")
    page.wait_for_status("64 tokens in")
    assert page.text("#used") == "Context: 65 of 64 tokens, the first 1 forgotten"


# Looks.

# The visible elements that are wider than the window, with their widths.
OUTSIDE = """
    return [...document.querySelectorAll('body *')]
        .filter(element => element.checkVisibility() && element.getClientRects().length)
        .map(element => [element.tagName, element.id, element.getBoundingClientRect()])
        .filter(([, , box]) => box.width && (box.left < 0 || box.right > arguments[0]))
        .map(([tag, id, box]) => `${tag}#${id} ${box.left} ${box.right}`)
        .concat(document.documentElement.scrollWidth > arguments[0] ? ['the page scrolls'] : []);
"""
# The contrast (WCAG 2) of each text with its background, lowest first, with the text's beginning.
CONTRASTS = """
    const parse = color => color.match(/[\\d.]+/g).map(Number);
    const over = ([r, g, b, a = 1], under) => [r, g, b].map((c, i) => a * c + (1 - a) * under[i]);
    const background = element => !element ? [255, 255, 255] :
        over(parse(getComputedStyle(element).backgroundColor), background(element.parentElement));
    const luminance = color => color.map(c => c / 255)
        .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + [0.2126, 0.7152, 0.0722][i] * c, 0);
    const contrast = element => {
        const below = background(element);
        const text = over(parse(getComputedStyle(element).color), below);
        const pair = [luminance(below), luminance(text)].sort((a, b) => b - a);
        return (pair[0] + 0.05) / (pair[1] + 0.05);
    };
    const hasText = element => element.matches('input, textarea') ||
        [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    return [...document.querySelectorAll('body *')]
        .filter(element => element.checkVisibility() && hasText(element))
        .map(element => [contrast(element), [...element.textContent].slice(0, 20).join('')])
        .sort((a, b) => a[0] - b[0]);
"""
# The visible controls that are too small for a finger, or in which phones zoom to read the text.
SMALL = """
    return [...document.querySelectorAll('button, input, textarea, select, summary')]
        .filter(element => element.checkVisibility())
        .map(element => [element, element.getBoundingClientRect(), getComputedStyle(element)])
        .filter(([element, box, style]) => Math.min(box.height, box.width) < 44 ||
            element.matches('input, textarea, select') && parseFloat(style.fontSize) < 16)
        .map(([element]) => element.id || element.tagName);
"""


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_chat_fits_and_is_readable(chat, page, width, scheme):
    page.open(chat.url, width, scheme)
    wait_for(lambda: page.shown("#talk"))
    page.click("#settings summary")
    page.type("#prompt", "W" * 40)
    page.click("#go")
    page.wait_for_status("tokens in")
    page.click("#kept summary")
    assert page.shown("#conversations .title")
    assert page.run(OUTSIDE, width) == []
    assert page.run(SMALL) == []
    lowest, text = page.run(CONTRASTS)[0]
    assert lowest >= 4.5, text


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_page_fits_and_is_readable(held, page, tmp_path, width, scheme):
    (tmp_path / "keys").write_text("right\n")
    live = held(keys=str(tmp_path / "keys"))
    page.open(live.url, width, scheme)

    def check() -> None:
        assert page.run(OUTSIDE, width) == []
        assert page.run(SMALL) == []
        lowest, text = page.run(CONTRASTS)[0]
        assert lowest >= 4.5, text

    wait_for(lambda: page.shown("#key"))
    check()
    assert not page.shown("#max_tokens")  # the settings are folded
    page.generate("W" * 200 + " world" * 10)
    page.wait_for_status("missing or invalid API key")
    check()
    page.type("#key", "right")
    page.click("#go")
    page.wait_for_status("the model's context is 64 tokens")
    check()
    page.generate("W" * 40, max_tokens=200, seed=1)
    wait_for(lambda: page.shown("#end") and live.network.waits)
    wait_for(lambda: page.run("return document.querySelectorAll('#answer .token').length"))
    page.run("document.querySelector('#answer .token').focus()")
    check()
    live.network.allowed.set()
    page.wait_for_status("200 tokens in")
    check()
    color = page.run("return getComputedStyle(document.documentElement).backgroundColor")
    levels = [int(level) for level in re.findall(r"\d+", color)]
    assert min(levels) > 200 if scheme == "light" else max(levels) < 50
