"""The engine: scheduling and answers, on a fake network with known tokens and on a real one."""

import collections
import itertools
import queue
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from mesh_transformer.generation.sampling import SamplingOptions
from mesh_transformer.serving import engine as engine_module
from mesh_transformer.serving.engine import (
    Engine,
    Progress,
    QueueFullError,
    Request,
    StoppedEngineError,
    Token,
)
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.serving.pages import Prompt
from mesh_transformer.serving.prefill import ALTERNATIVES, PREFILL_TOKENS
from mesh_transformer.serving.speculation import Speculation
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.support.fake_network import FakeNetwork
from tests.support.live_server import wait_for

SECONDS = 120  # after which a test counts as hanging


class Client:
    """A request, and the updates that the engine delivers for it."""

    def __init__(self, prompt, length, *, settings=None, **options):
        self.news: queue.Queue[Progress] = queue.Queue()
        options["settings"] = settings or SamplingOptions(seed=0)
        self.request = Request(np.array(prompt, np.int32), length, deliver=self.news.put, **options)

    def finish(self) -> list[Token]:
        """Return all tokens, or raise the error that the engine delivers."""
        tokens = []
        while True:
            progress = self.news.get(timeout=SECONDS)
            if progress.error is not None:
                raise progress.error
            tokens += progress.tokens
            if progress.ended:
                assert self.news.empty()
                return tokens

    def numbers(self) -> list[int]:
        return [token.number for token in self.finish()]


@pytest.fixture
def network():
    return FakeNetwork(np.random.default_rng(0).integers(0, 50257, 1000).tolist())


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    """Programs are compiled in advance as soon as there are no requests."""
    monkeypatch.setattr(engine_module, "QUIET_SECONDS", 0.0)


@pytest.fixture
def start():
    """A function that starts an engine, which is closed at the end of the test."""
    started = []

    def make(network, *, run=True, **options):
        engine = Engine(network, Metrics(options.get("rows", 4)), **({"rows": 4} | options))
        if run:
            engine.start()
        started.append((network, engine))
        return engine

    yield make
    for network, engine in started:
        if isinstance(network, FakeNetwork):
            network.allowed.set()
        engine.close()


def held(network, engine):
    """Submit a first request, whose call of the network blocks, and return its client."""
    network.allowed.clear()
    client = Client([1], 2)
    engine.submit([client.request])
    while not network.waits:
        time.sleep(0.001)
    return client


def random_clients(count, seed, n_vocab=50257, longest=40, **options):
    rng = np.random.default_rng(seed)
    return [
        Client(
            rng.integers(0, n_vocab, rng.integers(1, longest)),
            int(rng.integers(1, 30)),
            settings=SamplingOptions(
                temp=float(rng.choice([0.0, 0.7, 1.0])),
                top_p=float(rng.choice([0.5, 0.9, 1.0])),
                top_k=int(rng.choice([0, 5])),
                min_p=float(rng.choice([0.0, 0.1])),
                typical_p=float(rng.choice([1.0, 0.5])),
                repetition_penalty=float(rng.choice([1.0, 1.2])),
                frequency_penalty=float(rng.choice([0.0, 0.5])),
                seed=int(rng.integers(2**32)),
            ),
            **options,
        )
        for _ in range(count)
    ]


def test_an_error_between_two_calls_of_the_network_stops_the_engine(
    network, start, monkeypatch, capfd
):
    """The thread of the engine would end, and its clients would wait forever."""
    engine = start(network)
    monkeypatch.setattr(engine, "_drop_cancelled", lambda: [][0])
    client = Client([1], 2)
    engine.submit([client.request])
    with pytest.raises(StoppedEngineError):
        client.finish()
    assert engine.health_problem == "list index out of range"
    assert "[][0]" in capfd.readouterr().err  # the traceback
    with pytest.raises(StoppedEngineError):
        engine.submit([Client([1], 2).request])


@pytest.mark.quick(2)
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_every_request_gets_its_own_answer(network, start, steps):
    engine = start(network, steps=steps)
    clients = random_clients(60, seed=steps)
    for begin in range(0, 60, 7):
        engine.submit([client.request for client in clients[begin : begin + 7]])
    for client in clients:
        request = client.request
        expected = network.answer(request.prompt, request.settings.seed, request.length)
        assert client.numbers() == expected


def test_no_decode_steps_are_wasted(network, start):
    engine = start(network, rows=2, steps=4)
    first = held(network, engine)  # asks for two tokens
    short, long, waiting = Client([1], 3), Client([2], 8), Client([3], 1)
    engine.submit([short.request])
    engine.submit([long.request])
    engine.submit([waiting.request])
    network.allowed.set()
    for client in (first, short, long, waiting):
        client.numbers()
    decoded = [call[1] for call in network.calls if call[0] == "decode"]
    # One request has 2 tokens and one 3, with others waiting: 1 step until a row is free, then 1
    # again, and then 4 at a time until the last row is done.
    assert sum(decoded) <= 1 + 2 + 7
    assert max(decoded) == 4
    assert decoded[-1] < 4


def test_only_requests_for_logprobs_get_them(network, start):
    engine = start(network)
    plain, with_logprobs = Client([1, 2], 6), Client([1, 2], 6, logprobs=True)
    engine.submit([plain.request, with_logprobs.request])
    for token in plain.finish():
        assert token == Token(token.number)
    for token in with_logprobs.finish():
        assert token.logprob == -1 - token.number / 50400
        assert [number for number, _ in token.top] == list(range(ALTERNATIVES))


def test_stop_token_ends_a_request_and_frees_its_row(network, start):
    engine = start(network, rows=1)
    answer = network.answer([1], 0, 20)
    clients = [Client([1], 20, stop=frozenset([answer[6]])), Client([1], 20)]
    engine.submit([client.request for client in clients])
    first = answer.index(answer[6]) + 1
    assert clients[0].numbers() == answer[:first]
    assert clients[1].numbers() == answer


def test_at_most_one_prefill_between_decodes(network, start):
    engine = start(network, rows=8)
    first = held(network, engine)
    clients = random_clients(40, seed=5)
    engine.submit([client.request for client in clients])
    network.allowed.set()
    for client in [first, *clients]:
        client.finish()
    kinds = [call[0] for call in network.calls if call[0] != "batch"]
    # At the first insert no row decodes; after that, some row always does.
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(kinds)]
    assert all(length == 1 for kind, length in runs if kind == "insert")
    inserts = [call for call in network.calls if call[0] == "insert"]
    assert {count for _, count, _ in inserts} == {1, 2, 4}
    assert all(count == 1 or count * width <= PREFILL_TOKENS for _, count, width in inserts)


def test_requests_start_in_the_order_of_submission(network, start):
    engine = start(network, rows=2)
    order = []
    first = held(network, engine)
    clients = random_clients(30, seed=6)
    for number, client in enumerate(clients):
        deliver = client.request.deliver

        def record(progress, number=number, deliver=deliver):
            order.append(number)
            deliver(progress)

        client.request.deliver = record
    engine.submit([client.request for client in clients])
    network.allowed.set()
    for client in [first, *clients]:
        client.finish()
    assert list(dict.fromkeys(order)) == sorted(range(30))


def test_full_queue_accepts_all_requests_or_none(network, start):
    engine = start(network, rows=1, queue=3)
    first = held(network, engine)
    clients = [Client([1], 2) for _ in range(4)]
    with pytest.raises(QueueFullError) as full:
        engine.submit([client.request for client in clients])
    assert 1 <= full.value.retry_after <= 60
    engine.submit([client.request for client in clients[:3]])
    with pytest.raises(QueueFullError):
        engine.submit([clients[3].request])
    network.allowed.set()
    for client in [first, *clients[:3]]:
        client.finish()
    engine.submit([clients[3].request])
    assert len(clients[3].finish()) == 2


def test_simultaneous_requests_may_fill_the_free_rows_and_the_queue(network):
    # The engine has not been started, so it has not yet looked at any of them.
    engine = Engine(network, Metrics(2), rows=2, queue=3)
    requests = [Client([1], 2).request for _ in range(6)]
    for request in requests[:5]:
        engine.submit([request])
    with pytest.raises(QueueFullError):
        engine.submit(requests[5:])


def test_cancelled_requests_free_their_places(network, start):
    engine = start(network, rows=1, queue=2)
    long = Client([1], 10**6)
    waiting = [Client([1], 3), Client([2], 3)]
    engine.submit([long.request])
    long.news.get(timeout=SECONDS)
    engine.submit([client.request for client in waiting])
    engine.cancel(waiting[0].request)
    another = Client([3], 3)
    engine.submit([another.request])  # takes the place of the cancelled one
    engine.cancel(long.request)
    assert waiting[1].numbers() == network.answer([2], 0, 3)
    assert another.numbers() == network.answer([3], 0, 3)
    assert waiting[0].news.empty()


def test_prompt_scores_are_delivered_first(network, start):
    engine = start(network)
    prompt = [5, 6, 7]
    both, alone = Client(prompt, 3, score=True, logprobs=True), Client(prompt, 0, score=True)
    engine.submit([both.request, alone.request])
    scores = [client.news.get(timeout=SECONDS) for client in (both, alone)]
    assert [score.ended for score in scores] == [False, True]
    logprobs = network.logprobs()
    for score in scores:
        assert [token.number for token in score.prompt] == prompt
        assert score.prompt[0].logprob is None
        assert [token.logprob for token in score.prompt[1:]] == logprobs[[6, 7]].tolist()
        assert score.prompt[1].top[0][0] == logprobs.argmax()
    assert both.numbers() == network.answer(prompt, 0, 3)


def test_failure_ends_only_the_running_requests(network, start):
    engine = start(network, rows=2)
    first = held(network, engine)
    others = [Client([2], 3) for _ in range(3)]
    engine.submit([client.request for client in others])
    network.failures = [RuntimeError("device lost")]
    network.allowed.set()
    with pytest.raises(RuntimeError, match="device lost"):
        first.finish()
    for client in others:
        assert client.numbers() == network.answer([2], 0, 3)
    assert engine.failure is None
    # The others waited until everything was compiled again, as at the start.
    fresh = FakeNetwork(network.script)
    Engine(fresh, Metrics(2), rows=2).warm_up()
    begin = network.calls.index(("batch",), 1)
    assert network.calls[begin : begin + len(fresh.calls)] == fresh.calls


def test_permanent_network_failure_stops_the_engine(network, start):
    engine = start(network, rows=1)
    first = held(network, engine)
    waiting = Client([2], 3)
    engine.submit([waiting.request])
    network.failures = [RuntimeError("device lost"), RuntimeError("still lost")]
    network.allowed.set()
    with pytest.raises(RuntimeError, match="device lost"):
        first.finish()
    with pytest.raises(StoppedEngineError) as refused:
        waiting.finish()
    assert str(refused.value.__cause__) == "still lost"
    with pytest.raises(StoppedEngineError):
        engine.submit([Client([1], 1).request])


def test_close_serves_the_accepted_requests(network, start):
    engine = start(network, rows=1)
    first = held(network, engine)
    others = [Client([n], 9) for n in range(5)]
    engine.submit([client.request for client in others])
    closing = threading.Thread(target=engine.close)
    closing.start()
    while not engine._closing:
        time.sleep(0.001)
    with pytest.raises(StoppedEngineError):
        engine.submit([Client([1], 1).request])
    network.allowed.set()
    closing.join(SECONDS)
    assert not closing.is_alive()
    for client in [first, *others]:
        assert len(client.finish()) == client.request.length


def test_metrics_count_requests_and_tokens(network, start):
    metrics = Metrics(rows=4)
    engine = Engine(network, metrics, rows=4)
    engine.start()
    clients = random_clients(20, seed=8)
    engine.submit([client.request for client in clients])
    for client in clients:
        client.finish()
    engine.close()
    counted = collections.defaultdict(float)
    for family in metrics.registry.collect():
        for sample in family.samples:
            counted[sample.name.removeprefix("mesh_transformer_")] += sample.value
    assert counted["generated_tokens_total"] == sum(c.request.length for c in clients)
    assert counted["prompt_tokens_total"] == sum(len(c.request.prompt) for c in clients)
    assert counted["time_to_first_token_seconds_count"] == 20
    assert (counted["queue_length"], counted["rows_active"], counted["rows"]) == (0, 0, 4)
    assert counted["tokens_per_second"] > 0


def compiled(network: FakeNetwork, **options: Any) -> list[tuple[Any, ...]]:
    """Return the calls of a warm-up that waits for all programs."""
    network = FakeNetwork(network.script)
    Engine(network, Metrics(4), rows=4, **options).warm_up()
    return network.calls


@pytest.mark.parametrize("pooling", [None, "mean"])
def test_requests_come_before_the_programs_that_they_do_not_need(network, start, pooling):
    expected = compiled(network, pooling=pooling)
    engine = start(network, run=False, pooling=pooling)
    engine.warm_up(wait=False)
    early = len(network.calls)
    assert expected[:early] == network.calls
    assert {call[0] for call in network.calls} == {"batch", "decode"}
    first = Client([1, 2], 3)
    engine.submit([first.request])
    engine.start()
    assert first.numbers() == network.answer([1, 2], 0, 3)
    assert network.calls[early : early + 2] == [("insert", 1, 2), ("decode", 2)]


def test_prompts_use_compiled_programs_while_others_are_compiled(network, start, monkeypatch):
    engine = start(network, run=False)
    engine.warm_up(wait=False)
    for _ in range(2):  # those that can be used for all prompts
        engine._warm_up.compile_next()
    batch, calls = engine._prefiller.batch, []
    insert = batch.insert

    def recorded(rows, prompts, *settings, longest, **options):
        calls.append((len(prompts), longest))
        return insert(rows, prompts, *settings, longest=longest, **options)

    monkeypatch.setattr(batch, "insert", recorded)

    def answer():
        calls.clear()
        clients = [Client([1] * n, 3) for n in (2, 5, 40)]
        engine.submit([client.request for client in clients])
        engine.start()
        return [client.numbers() for client in clients]

    expected = [network.answer([1] * n, 0, 3) for n in (2, 5, 40)]
    assert answer() == expected
    assert calls[:3] == [(1, 64)] * 3  # of the whole window
    wait_for(lambda: not engine._warm_up.left)
    monkeypatch.setattr(engine, "start", lambda: None)
    assert answer() == expected
    assert calls == [(2, 16), (1, 64)]


def test_programs_are_compiled_only_some_time_after_a_request(network, start, monkeypatch):
    monkeypatch.setattr(engine_module, "QUIET_SECONDS", 3600.0)
    engine = start(network, run=False)
    engine.warm_up(wait=False)
    first, second = Client([1, 2], 3), Client([1, 2, 3], 3)
    engine.submit([first.request])
    engine.start()
    assert first.numbers() == network.answer([1, 2], 0, 3)
    left = engine._warm_up.left
    assert left > 2
    engine.submit([second.request])
    assert second.numbers() == network.answer([1, 2, 3], 0, 3)
    assert engine._warm_up.left == left
    monkeypatch.setattr(engine_module, "QUIET_SECONDS", 0.0)
    with engine._wake:
        engine._wake.notify_all()
    wait_for(lambda: not engine._warm_up.left)


def test_programs_are_compiled_while_no_request_is_there(network, start):
    expected = compiled(network)
    engine = start(network, run=False)
    engine.warm_up(wait=False)
    engine.start()
    wait_for(lambda: len(network.calls) == len(expected))
    assert network.calls == expected
    network.allowed.clear()  # the next call is a request's
    client = Client([1, 2], 3)
    engine.submit([client.request])
    wait_for(lambda: network.waits)
    assert len(network.calls) == len(expected)
    network.allowed.set()
    assert client.numbers() == network.answer([1, 2], 0, 3)


def test_requests_that_hang_while_programs_are_compiled_are_a_stall(network, start):
    engine = start(network, run=False, stall_seconds=0.1)
    engine.warm_up(wait=False)
    client = Client([1, 2], 3)
    engine.submit([client.request])
    network.allowed.clear()
    engine.start()
    wait_for(lambda: engine.health_problem is not None)
    assert "(limit 1 s)" in engine.health_problem
    network.allowed.set()
    client.finish()
    expected = compiled(network)
    wait_for(lambda: len(network.calls) == len(expected) + 2)
    wait_for(lambda: engine.health_problem is None)


@pytest.mark.parametrize("again", [False, True])
def test_programs_that_cannot_be_compiled_are_tried_twice(network, start, again, capsys):
    all_calls = compiled(network)  # before the engine has a bar, which would be below this one
    engine = start(network, run=False)
    engine.warm_up(wait=False)
    early, error = len(network.calls), RuntimeError("out of memory")
    network.failures = [None, error, *[None] * (early + 1), *[error] * again]
    engine.start()
    if again:
        wait_for(lambda: engine.failure is error)
        with pytest.raises(StoppedEngineError):
            engine.submit([Client([1], 1).request])
    else:
        wait_for(lambda: len(network.calls) == early + 2 + len(all_calls))
        client = Client([1, 2], 3)
        engine.submit([client.request])
        assert client.numbers() == network.answer([1, 2], 0, 3)
    engine.close()
    assert capsys.readouterr().err.endswith(" \r")  # the bar has been removed


@pytest.mark.quick(1)
@pytest.mark.parametrize("pe", ["rotary", "fixed"])
def test_warm_up_compiles_every_later_call(pe):
    network = FakeNetwork(range(100), n_vocab=100, window=1000, seq=1000, pe=pe)
    engine = Engine(network, Metrics(4), rows=4)
    engine.warm_up()
    warm = {padded(call) for call in network.calls}
    network.calls.clear()
    engine.start()
    clients = random_clients(60, seed=10, n_vocab=100, longest=970)
    clients += random_clients(60, seed=11, n_vocab=100, longest=100, logprobs=True)
    clients += [Client([1] * n, 1, score=True) for n in (1, 16, 17, 999, 1000)]
    engine.submit([client.request for client in clients])
    for client in clients:
        client.finish()
    engine.close()
    assert {padded(call) for call in network.calls} <= warm


def padded(call):
    """Return a call as it is compiled, with the width that the network pads prompts to."""
    kind, *sizes = call
    if kind not in ("insert", "chunk"):
        return kind, *(sizes if kind == "score" else [])
    count, width = sizes
    return kind, count, min(max(1 << (width - 1).bit_length(), 16), 1000)


def calls_of(network, *kinds):
    return [call for call in network.calls if call[0] in kinds]


def long_network(window=2000):
    return FakeNetwork(range(100), n_vocab=100, window=window)


def test_long_prompts_take_turns_with_decoding_and_short_prompts(start):
    network = long_network()
    engine = start(network, chunk=64)
    first = held(network, engine)
    rng = np.random.default_rng(0)
    order, clients = [], []
    for length in (1500, 40, 30, 20):
        client = Client(rng.integers(0, 100, length), 50)
        begun = client.request.deliver

        def record(progress, length=length, begun=begun):
            order.append(length)
            begun(progress)

        client.request.deliver = record
        clients.append(client)
    decoding = Client([1], 10**4)
    engine.submit([decoding.request, *(client.request for client in clients)])
    network.allowed.set()
    for client in [first, *clients]:
        assert len(client.numbers()) == client.request.length
    engine.cancel(decoding.request)
    assert list(dict.fromkeys(order))[-1] == 1500  # the short prompts did not wait for it
    kinds = [call[0] for call in network.calls if call[0] != "batch"]
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(kinds)]
    assert all(length == 1 for kind, length in runs if kind != "decode")
    begin, *_, end = (at for at, call in enumerate(network.calls) if call[0] == "chunk")
    between = [call[1] for call in network.calls[begin:end] if call[0] == "decode"]
    assert max(between) == 2  # half of the usual 4 steps, so that deliveries are not late
    assert network.calls[-1][:2] == ("decode", 4)
    chunks = calls_of(network, "chunk")
    assert all(count == 1 and width <= 64 for _, count, width in chunks)
    assert len(chunks) >= 1500 // 64


def test_equal_beginnings_are_computed_once(start):
    network = long_network()
    engine = start(network, chunk=64)
    common = np.random.default_rng(1).integers(0, 100, 1000)
    clients = [Client([*common, n], 3) for n in range(4)]
    engine.submit([client.request for client in clients])
    for client in clients:
        assert client.numbers() == network.answer(client.request.prompt, 0, 3)
    # Each row computes at least the tokens after the last complete page.
    computed = sum(count * width for _, count, width in calls_of(network, "insert", "chunk"))
    assert computed <= 1000 + 4 * 17
    assert sum(client.request.cached for client in clients) == 4 * 1001 - computed
    again = Client([*common[:500], 7], 3)
    engine.submit([again.request])
    again.finish()
    assert again.request.cached == 496  # 31 pages of 16
    short = Client([*common[:30], 7], 3)
    engine.submit([short.request])
    short.finish()
    assert short.request.cached == 0  # it may share a call with others, which saves more


def test_prompts_that_exceed_the_window_with_their_answers_are_kept_too(start):
    """The first answer is written over all of its prompt, of which the row has a copy."""
    network = long_network()
    window = network.config.window
    engine = start(network, rows=2, chunk=64)
    prompt = np.random.default_rng(2).integers(0, 100, window)
    for cached in (0, (window - 1) // 16 * 16):
        client = Client(prompt, window + 1)
        engine.submit([client.request])
        assert client.numbers() == network.answer(prompt, 0, window + 1)
        assert client.request.cached == cached
    engine.close()
    assert engine._prefiller.used_tokens == 0


def test_nothing_is_kept_if_the_pool_is_empty(start):
    network = long_network()
    engine = start(network, chunk=64, kept_tokens=0)
    for _ in range(2):
        client = Client(range(99), 3)
        engine.submit([client.request])
        client.finish()
        assert client.request.cached == 0
    widths = [width for _, _, width in calls_of(network, "insert", "chunk")]
    assert widths == [64, 35, 64, 35]


@pytest.mark.parametrize("kept_tokens", [0, None])
def test_requests_wait_for_pages_and_give_them_back(start, kept_tokens):
    """Memory for one longest request, and four rows, some of whose clients leave."""
    network = long_network()
    window = network.config.window
    engine = start(network, rows=4, chunk=64, kept_tokens=kept_tokens, cache_tokens=window)
    clients = random_clients(40, seed=3, n_vocab=100, longest=window // 2)
    engine.submit([client.request for client in clients])
    for client in clients[::7]:
        engine.cancel(client.request)
    for at, client in enumerate(clients):
        if at % 7:
            request = client.request
            expected = network.answer(request.prompt, request.settings.seed, request.length)
            assert client.numbers() == expected
    engine.close()
    assert engine._prefiller.used_tokens == 0


def test_a_request_waits_if_another_of_its_turn_takes_what_it_was_to_share():
    """Both have room together only while the second one shares the beginning of a running one."""
    prefiller = Engine(long_network(160), Metrics(4), rows=4, chunk=32, cache_tokens=23 * 16)
    prefiller = prefiller._prefiller
    rng = np.random.default_rng(0)
    running, ended, other = (rng.integers(0, 100, length) for length in (160, 80, 100))

    def insert(row, prompt, length):
        request, chosen = Client(prompt, length).request, None
        assert prefiller.place([request], [row], chunks=True) == [row]
        while chosen is None:
            _, chosen = prefiller.insert_chunk(request, 32)

    insert(0, running, 32)  # its answer is written over two pages, so it has these twice at first
    insert(1, ended, 1)
    prefiller.release([1])
    assert prefiller._rows_for([Prompt(other), Prompt(running)], [120, 192], [1, 2, 3], True) == [
        1,
        2,
    ]
    both = [Client(other, 20).request, Client(running, 32).request]
    assert prefiller.place(both, [1, 2, 3], chunks=True) == [1]
    prefiller.release([1])
    insert(2, running, 32)
    prefiller.release([0, 2])
    assert prefiller.used_tokens == 0


def test_rows_take_as_much_memory_as_their_tokens():
    prefiller = Engine(long_network(), Metrics(64), rows=64)._prefiller
    rng, tokens = np.random.default_rng(0), 0
    for row in range(64):
        prompt, length = np.zeros(rng.integers(20, 400), int), int(rng.integers(1, 100))
        assert prefiller.place([Client(prompt, length).request], [row], chunks=True) == [row]
        tokens += len(prompt) + length
    assert tokens <= prefiller.used_tokens <= tokens + 64 * 15  # pages of 16
    assert prefiller.used_tokens <= 1.3 * tokens
    prefiller.release(range(64))
    assert prefiller.used_tokens == 0


def test_a_cache_without_room_for_a_page_is_an_error():
    message = "room for 15 tokens, expected at least 16, a page; raise --cache-tokens"
    with pytest.raises(InputError, match=message):
        Engine(long_network(), Metrics(4), rows=4, cache_tokens=15)


def test_a_cancelled_long_prompt_frees_its_row(start):
    network = long_network(10**5)
    engine = start(network, rows=1, chunk=16, kept_tokens=0)
    long, after = Client(np.zeros(10**5, int), 3), Client([1, 2], 3)
    engine.submit([long.request])
    while not calls_of(network, "chunk"):
        time.sleep(0.001)
    engine.submit([after.request])
    engine.cancel(long.request)
    assert after.numbers() == network.answer([1, 2], 0, 3)
    assert len(calls_of(network, "chunk")) < 10**5 // 16
    assert engine.active == 0
    assert long.news.empty()


def test_a_failure_between_two_chunks_forgets_what_was_kept(start):
    network = long_network()
    engine = start(network, chunk=64)
    prompt = np.random.default_rng(2).integers(0, 100, 500)
    network.failures = [None, None, RuntimeError("device lost")]
    failed = Client(prompt, 3)
    engine.submit([failed.request])
    with pytest.raises(RuntimeError, match="device lost"):
        failed.finish()
    again = Client(prompt, 3)
    engine.submit([again.request])
    assert again.numbers() == network.answer(prompt, 0, 3)
    assert again.request.cached == 0


def test_chunks_are_short_while_other_rows_wait_for_them(network, monkeypatch):
    prefiller = Engine(long_network(), Metrics(4), rows=4, kept_tokens=0)._prefiller
    assert prefiller.chunk(0.001) == 256  # before anything was timed
    for _, compile_program in prefiller.programs():
        compile_program()
    prefiller._seconds = {16: 0.02, 32: 0.03, 64: 0.05, 128: 0.1, 256: 0.2}
    seconds = (1.0, 0.2, 0.19, 0.1, 0.05, 0.03, 0.001, None)
    assert [prefiller.chunk(s) for s in seconds] == [256, 256, 128, 128, 64, 32, 32, 256]
    # The times follow what is measured: by this clock, each call takes a millisecond.
    clock = itertools.count()
    fake = types.SimpleNamespace(perf_counter=lambda: next(clock) / 1000)
    monkeypatch.setattr("mesh_transformer.serving.prefill.time", fake)
    request = Client(np.zeros(200, int), 1).request
    prefiller.place([request], [0], chunks=True)
    for _ in range(30):
        request.filled = 60
        prefiller.insert_chunk(request, 128)
    assert prefiller._seconds[128] < 0.05
    prefiller._observe(256, 100.0)  # something held the machine up
    assert prefiller.chunk(1.0) == 128
    prefiller._observe(128, 0.001)
    assert prefiller.chunk(1.0) == 256
    fixed = Engine(long_network(), Metrics(4), rows=4, fixed_shapes=True)._prefiller
    for _, compile_program in fixed.programs():
        compile_program()
    assert fixed.chunk(1e-9) == 256


@pytest.mark.parametrize("guesses", [1, 5])
def test_every_request_gets_its_own_answer_by_speculation(network, start, guesses):
    """The fake network's guesses are right more often in some rows than in others."""
    engine = start(network, speculate=guesses)
    clients = random_clients(60, seed=guesses)
    engine.submit([client.request for client in clients])
    for client in clients:
        request = client.request
        expected = network.answer(request.prompt, request.settings.seed, request.length)
        assert client.numbers() == expected


def test_calls_guess_while_it_saves_time():
    metrics = Metrics(1)
    policy = Speculation(4, metrics)

    def observe(tokens, seconds, calls):
        """Return the share of calls that guess, if a step with guesses takes `seconds`."""
        made = []
        for _ in range(calls):
            made.append(policy.next())
            # Two steps of two rows.
            call = (2 * seconds, 2, [2 * tokens] * 2) if made[-1] else (2.0, 2, [2, 2])
            policy.observe(made[-1], *call)
        return sum(made[calls // 2 :]) / (calls - calls // 2)

    def value(name: str) -> float:
        sample = metrics.registry.get_sample_value(f"mesh_transformer_{name}_total")
        assert sample is not None
        return sample

    assert observe(tokens=3.0, seconds=1.5, calls=320) == 15 / 16
    # A token of each step is not guessed.
    assert value("right_guesses") * 2 == value("guessed_tokens") > 0
    assert observe(tokens=1.5, seconds=2.0, calls=3200) == 1 / 16
    assert observe(tokens=2.5, seconds=2.0, calls=3200) == 15 / 16
    policy.observe(True, 1.0, 2, [])  # all answers have ended
    assert [Speculation(0, metrics).next() for _ in range(3)] == [False] * 3
    assert [Speculation(4, metrics, always=True).next() for _ in range(3)] == [True] * 3


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Yield a list of the events of all compilations, which grows."""
    events: list[str] = []

    def listen(event: str, _: float, **__: Any) -> None:
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("partitioning", "drafts"), [("shard_map", False), ("jit", False), ("shard_map", True)]
)
def test_engine_on_a_real_network_matches_generate(
    small, partitioning, drafts, compilations, tmp_path
):
    """With a draft, the model itself: its keys and values of chunks and kept pages are right too.

    Otherwise some of its guesses would be wrong.
    """
    config = small(seq=32, tpu_size=4, cores_per_replica=2, partitioning=partitioning)
    network = CausalTransformer(config)
    clients = random_clients(20, seed=9, n_vocab=128, logprobs=True)
    metrics, options = Metrics(8), {}
    if drafts:
        network.save(tmp_path)
        network.wait()
        network.add_draft(tmp_path)
        options = {"speculate": 2, "chunk": 8, "fixed_shapes": True}
        for client in clients:  # equal beginnings, in chunks and pages of 8
            client.request.prompt = np.concatenate((np.arange(17), client.request.prompt[:9]))
    engine = Engine(network, metrics, rows=8, **options)
    engine.warm_up()
    assert compilations
    compilations.clear()
    engine.start()
    engine.submit([client.request for client in clients])
    results = [client.finish() for client in clients]
    engine.close()
    # Nothing was compiled again, although a replica gets 4, 3, 2 or 1 of 4 prompts.
    assert not compilations
    if drafts:
        counts = [
            metrics.registry.get_sample_value(f"mesh_transformer_{name}_total") or 0
            for name in ("guessed_tokens", "right_guesses", "cached_prompt_tokens")
        ]
        assert counts[0] == counts[1] > 0
        assert counts[2] > 0
    for client, tokens in zip(clients, results, strict=True):
        request = client.request
        options = request.settings.options()
        expected = network.generate(
            request.prompt[None], np.array([len(request.prompt)]), request.length, options
        )
        assert [token.number for token in tokens] == expected[0].tolist()
