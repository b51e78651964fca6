"""Two thousand concurrent hostile requests of every kind, with good requests beside them."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.hostile_requests import Hostile
from tests.support.live_server import SECONDS, wait_for

pytest_plugins = ["tests.support.live_fixtures"]


@pytest.mark.slow
def test_two_thousand_hostile_requests_do_not_affect_good_ones(serve, tmp_path):
    (tmp_path / "keys").write_text("right\n")
    live = serve(keys=str(tmp_path / "keys"), rows=4)
    live.network.seconds = 0.001
    live.http.headers["Authorization"] = "Bearer right"
    expected = {seed: live.text([15496], seed, 30) for seed in range(50)}
    stop, wrong_answers, served = threading.Event(), [], 0

    def good() -> None:
        nonlocal served
        while not stop.is_set():
            seed = random.randrange(50)
            body = {"prompt": "Hello", "max_tokens": 30, "seed": seed}
            answer = live.http.post("/v1/completions", json=body)
            if answer.status_code != 200 or answer.json()["choices"][0]["text"] != expected[seed]:
                wrong_answers.append((answer.status_code, answer.text[:200]))
            served += 1

    good_clients = [threading.Thread(target=good) for _ in range(3)]
    for thread in good_clients:
        thread.start()
    hostile = Hostile(live, seed=0, more=["wrong_key"])
    with ThreadPoolExecutor(8) as pool:
        complaints = [complaint for complaint in pool.map(hostile.run, range(2000)) if complaint]
    stop.set()
    for thread in good_clients:
        thread.join(SECONDS)
    assert not complaints, complaints[:5]
    assert not wrong_answers, wrong_answers[:5]
    assert served > 100
    # Requests whose clients have left are not served any longer.
    wait_for(lambda: live.engine.active == live.engine.waiting == 0)
    assert live.http.get("/health").json()["status"] == "ok"
