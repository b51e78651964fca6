"""The web page in a real browser: Debian's Chromium, driven by its WebDriver."""

import base64
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support.live_server import SECONDS, wait_for

pytest_plugins = ["tests.support.live_fixtures"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="no chromium with chromium-driver here",
    ),
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key in the WebDriver standard


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

    def point_at(self, css: str) -> None:
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0}
        origin = {ELEMENT: self.element(css)}
        mouse = {"type": "pointer", "id": "mouse", "actions": [move | {"origin": origin}]}
        self.do("actions", actions=[mouse])

    def screenshot(self) -> bytes:
        return base64.b64decode(self.http.get("screenshot").json()["value"])


@pytest.fixture
def browser(tmp_path) -> Iterator[Callable[[str], Browser]]:
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert driver.stdout is not None
    opened: list[Browser] = []

    def open_page(url: str) -> Browser:
        for line in driver.stdout or ():
            if match := re.search(r"on port (\d+)\.", line):
                opened.append(Browser(f"http://127.0.0.1:{match[1]}", str(tmp_path / "profile")))
                opened[-1].do("url", url=url)
                return opened[-1]
        raise AssertionError("chromedriver does not start")

    yield open_page
    for page in opened:
        page.http.delete(str(page.http.base_url).rstrip("/"))  # ends the browser
        page.http.close()
    os.killpg(driver.pid, signal.SIGKILL)
    driver.communicate(timeout=SECONDS)


def test_answer_to_a_typed_prompt_streams_in(serve, browser, tmp_path):
    live = serve()
    live.network.seconds = 0.05  # so that the test can see partial text
    page = browser(live.url)
    wait_for(lambda: page.text("#model") == "fake")
    page.type("#prompt", "Hello")
    page.type("#max_tokens", "60")
    page.type("#seed", "3")
    page.click("#go")
    expected = "Hello" + live.text([15496], 3, 60)
    seen = set()
    while not page.text("#status").startswith("60 tokens"):
        seen.add(page.text("#answer"))
        time.sleep(0.01)
    assert page.text("#answer") == expected
    assert len(seen) > 5
    assert all(expected.startswith(part) for part in seen)
    assert page.run("return document.querySelectorAll('#answer .token').length") > 20

    page.point_at("#answer .token:nth-of-type(3)")
    wait_for(lambda: page.run("return !document.getElementById('likely').hidden"))
    lines = page.text("#likely")
    assert lines.count("%") >= 5
    image = page.screenshot()
    assert image.startswith(b"\x89PNG")
    (tmp_path / "page.png").write_bytes(image)

    # The browser reported no errors, such as violations of the page's security policy.
    assert [entry["message"] for entry in page.do("se/log", type="browser")] == []


def test_stop_sequence_stop_button_and_missing_key(serve, browser, tmp_path):
    (tmp_path / "keys").write_text("right\n")
    live = serve(keys=str(tmp_path / "keys"))
    page = browser(live.url)
    page.type("#prompt", "Hello")
    page.click("#go")
    wait_for(lambda: "API key" in page.text("#status"))
    page.type("#key", "right")
    page.type("#max_tokens", "40")
    page.type("#seed", "0")
    page.type("#stop", "upon")
    page.click("#go")
    wait_for(lambda: "tokens in" in page.text("#status"))
    assert page.text("#answer") == "Hello" + live.text([15496], 0, 40).partition("upon")[0]
    live.network.seconds = 0.05
    page.type("#max_tokens", "500")
    page.type("#stop", " ")
    page.run("document.getElementById('stop').value = ''")
    page.click("#go")
    wait_for(lambda: len(page.text("#answer")) > 20)
    page.click("#end")
    wait_for(lambda: page.text("#status") == "stopped")
    wait_for(lambda: live.engine.active == 0)
