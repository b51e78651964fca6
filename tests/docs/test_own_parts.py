"""The code of docs/own-parts.md, run as written."""

import importlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from tests.support.pages import reader, write_files
from tests.support.waiting import SECONDS


@pytest.fixture
def webhook() -> Iterator[tuple[str, "queue.Queue[str]"]]:
    """Yield the address of a server, and the texts that it gets."""
    texts: queue.Queue[str] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            texts.put(json.loads(content)["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", texts
        server.shutdown()


def test_alerts_reach_a_webhook(tmp_path, monkeypatch, webhook, capsys):
    url, texts = webhook
    (path,) = (p for p in write_files("docs/own-parts.md", tmp_path) if p.name == "alerts.py")
    lines = path.read_text().splitlines()
    assert len(list(filter(None, lines))) < 40
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ALERT_URL", url)
    alerts = importlib.import_module("alerts")
    monkeypatch.delitem(sys.modules, "alerts")
    noise = np.random.default_rng(0).uniform(0.9, 1.1, 30)
    rows = [{"step": n + 1, "train/loss": 4 * x * 0.98**n} for n, x in enumerate(noise)]
    rows[20]["train/loss"] = 9.0
    rows[24] = {"step": 25, "train/skipped": 1}
    for row in rows:
        alerts.hook(row)
    assert {row["step"]: row["alert/loss"] for row in rows if "alert/loss" in row} == {21: 9.0}
    assert [row["step"] for row in rows if "alert/skipped" in row] == [25]
    actual = sorted(texts.get(timeout=SECONDS) for _ in range(2))
    assert actual[0].startswith("step 21: loss 9.0000, was 3.")
    assert actual[1] == "step 25: 1 updates were skipped"
    monkeypatch.setattr(alerts, "SILENCE", 0.01)
    alerts.hook(rows[-1])
    assert texts.get(timeout=SECONDS) == "no step in 0.01 s after step 30"
    subprocess.run([sys.executable, path, "the run ended with status 3"], check=True)
    assert texts.get(timeout=SECONDS) == "the run ended with status 3"
    monkeypatch.setattr(alerts, "URL", "")
    alerts.send("lost")
    assert "alert not sent (unknown url type: ''): lost" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write_files("docs/own-parts.md", tmp_path)
    with reader(tmp_path, monkeypatch) as person:
        person.follow("docs/own-parts.md")
        rows = person.names["rows"]
    assert len(rows) == 60
    assert rows[-1]["train/loss"] < 0.1 < rows[0]["train/loss"]  # the model has learnt to count
    assert "train/grad_norm/layer_1" in rows[-1]
