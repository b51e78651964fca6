"""Two thousand requests of every bad kind at once, and good ones beside them."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.hostile_requests import Hostile
from tests.support.live_server import SECONDS, wait_for

pytest_plugins = ["tests.support.live_fixtures"]


@pytest.mark.slow
def test_two_thousand_hostile_requests(serve, tmp_path):
    (tmp_path / "keys").write_text("right\n")
    live = serve(keys=str(tmp_path / "keys"), rows=4)
    live.network.seconds = 0.001
    live.http.headers["Authorization"] = "Bearer right"
    wanted = {seed: live.text([15496], seed, 30) for seed in range(50)}
    stop, harmed, served = threading.Event(), [], 0

    def good() -> None:
        nonlocal served
        while not stop.is_set():
            seed = random.randrange(50)
            body = {"prompt": "Hello", "max_tokens": 30, "seed": seed}
            answer = live.http.post("/v1/completions", json=body)
            if answer.status_code != 200 or answer.json()["choices"][0]["text"] != wanted[seed]:
                harmed.append((answer.status_code, answer.text[:200]))
            served += 1

    beside = [threading.Thread(target=good) for _ in range(3)]
    for thread in beside:
        thread.start()
    hostile = Hostile(live, seed=0, more=["wrong_key"])
    with ThreadPoolExecutor(8) as pool:
        complaints = [found for found in pool.map(hostile.run, range(2000)) if found]
    stop.set()
    for thread in beside:
        thread.join(SECONDS)
    assert not complaints, complaints[:5]
    assert not harmed, harmed[:5]
    assert served > 100
    # What its clients left is not served on for nobody.
    wait_for(lambda: live.engine.active == live.engine.waiting == 0)
    assert live.http.get("/health").json()["status"] == "ok"
