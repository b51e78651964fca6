"""A cluster of two hosts under Ray: its results, running batches, and failures of its hosts."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import eval_harness
from mesh_transformer.config import Config
from mesh_transformer.evaluation import harness, validation
from mesh_transformer.generation.batch import Decode, Insert
from mesh_transformer.generation.decode import Chosen
from mesh_transformer.generation.generator import SMALLEST_CACHE
from mesh_transformer.generation.sampling import sampler_settings
from mesh_transformer.network import Network
from mesh_transformer.pod import restarts
from mesh_transformer.pod.fleet import MOST_UNREAD, DispatchedStep, Fleet, PendingMetric
from mesh_transformer.pod.launch import build_model, local_machines
from mesh_transformer.pod.runner import StepReport
from mesh_transformer.serving.engine import ALTERNATIVES, Engine
from mesh_transformer.serving.metrics import Metrics
from mesh_transformer.training import loop
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import HostError, InputError, NonFiniteError
from tests.conftest import random_batch
from tests.generation.test_adapters import random_factors
from tests.generation.test_speculation import answers
from tests.long.interruptions import (
    KINDS,
    Interruption,
    interrupt,
    interrupted_saves,
    members,
    sessions_of,
    uninterrupted,
    wait_until,
)
from tests.serving.test_engine import Client, random_clients
from tests.support import made_tasks
from tests.support.mixes import bits_of
from tests.support.ray_nodes import other_node, vanish
from tests.support.small_run import (
    VALUES,
    VOCAB,
    assert_same_rows,
    damage_step,
    rows_of,
    run_values,
    write_config,
)
from tests.support.waiting import SECONDS

CONFIG = Config(**VALUES)
# f32 rounds to 6e-8, and several processes add in a different order than one.
OTHER_PROCESSES = 1e-5


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    with local_machines(CONFIG, 2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def cluster(machines) -> Iterator[Any]:
    # It stays open beside later tests; a host that a busy machine holds up is not dead.
    with closing(build_model(CONFIG, machines(), heartbeat=100)) as network:
        network.init()
        yield network


@pytest.fixture(scope="module")
def single() -> CausalTransformer:
    return CausalTransformer(CONFIG, devices=jax.devices()[:8])


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie (Linux only)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_hosts_reserve_equal_caches_for_idle_rows():
    """An idle row whose cache is full grows the cache of its host, so other hosts must grow too."""
    reserved = []

    class TwoMembers(Fleet):
        def __init__(self) -> None:
            super().__init__(CONFIG.replace(seq=1024))
            self.dp, self.replicas = 2, [[0], [1]]

        def call(self, method: str, *arguments: tuple[Any, ...], agree: float = 0.0) -> list[Any]:
            calls = [call for (call,) in arguments]
            if isinstance(calls[0], Insert):
                return [Chosen(np.zeros(len(call.row_P), np.uint32)) for call in calls]
            if isinstance(calls[0], Decode):
                reserved.append([call.positions for call in calls])
                assert [call.left.tolist() for call in calls] == [[0, 0], [14, 0]]
                return [(Chosen(np.zeros((2, 4), np.uint32)), None)] * 2
            return [None, None]

    batch = TwoMembers().batch(4)
    prompts = [np.ones(length, int) for length in (SMALLEST_CACHE, 9)]
    batch.insert([0, 2], prompts, [1, 15], sampler_settings({}, 2))
    batch.decode(4)
    assert reserved == [[SMALLEST_CACHE + 1] * 2]
    assert batch.left.tolist() == [0, 0, 10, 0]


def test_answers_end_at_the_models_end_tokens(monkeypatch):
    rng, ends, length = np.random.default_rng(3), [5, 7], 12
    tokens = rng.integers(0, 16, (6, length))
    monkeypatch.setattr(
        "mesh_transformer.network.stream_tokens", lambda *_, **__: np.split(tokens, 4, axis=1)
    )
    network = Network()
    network.config, network.dp = CONFIG.replace(end_tokens=ends), 2
    monkeypatch.setattr(network, "batch", lambda rows: types.SimpleNamespace(insert=print))
    actual = network.generate(np.ones((6, 3), int), [3] * 6, length)
    for answer, row in zip(actual.tolist(), tokens.tolist(), strict=True):
        end = next((at for at, token in enumerate(row) if token in ends), length)
        assert answer == (row[: end + 1] + row[end : end + 1] * length)[:length]
    assert (actual != tokens).any()


def test_a_pending_metric_can_be_used_as_a_number():
    pending = PendingMetric(lambda step: {"loss": 2.5}, DispatchedStep(1, []), "loss")
    assert (float(pending), f"{pending:.2f}") == (2.5, "2.50")
    assert np.asarray(pending).dtype == np.float64
    np.testing.assert_array_equal(np.mean([pending, 3.5]), 3.0)


def test_cluster_matches_a_single_process(cluster, single, tmp_path):
    assert (cluster.batch_size, cluster.noise_batches) == (single.batch_size, single.noise_batches)
    assert cluster.peak_flops is single.peak_flops is None  # a CPU has no data sheet
    assert cluster.replicas == [[0], [1]]
    steps = [(cluster.train(random_batch(CONFIG, 2, 4, seed=s)), s) for s in range(4)]
    # Metrics that are read out of order still belong to the right step.
    for actual, seed in [steps[1], steps[0], *steps[2:]]:
        actual["seed"] = seed
    references = [single.train(random_batch(CONFIG, 2, 4, seed=s)) for s in range(4)]
    for (actual, _), expected in zip(steps, references, strict=True):
        assert {f"host_seconds/{rank}" for rank in range(2)} | set(expected) == set(actual) - {
            "seed"
        }
        for name, value in expected.items():
            assert float(actual[name]) == pytest.approx(float(value), rel=OTHER_PROCESSES), name
        assert all(0 < float(actual[f"host_seconds/{rank}"]) < 60 for rank in range(2))
    assert cluster.step == single.step == 4

    for rows in (1, 2, 5):
        batch = random_batch(CONFIG, rows, seed=rows)
        for name, value in single.eval(batch).items():
            np.testing.assert_allclose(cluster.eval(batch)[name], value, rtol=1e-5, atol=1e-6)
        scored = zip(cluster.score(batch["obs"], 3), single.score(batch["obs"], 3), strict=True)
        for actual, value in scored:  # f32 logprobs near 5, added in a different order
            np.testing.assert_allclose(actual, value, rtol=0, atol=1e-5)
        texts = batch["obs"], np.arange(1, rows + 1)
        embedded = (network.embed(*texts) for network in (cluster, single))
        # Means of normed values of order 1, in f32.
        np.testing.assert_allclose(*embedded, rtol=0, atol=1e-5)
    rng = np.random.default_rng(0)
    prompts, length = rng.integers(0, VOCAB, (5, 40)), np.asarray([1, 3, 2, 12, 9])
    options = {"seed": np.arange(5), "top_p": np.linspace(0.2, 1, 5), "temp": 0.8}
    np.testing.assert_array_equal(
        cluster.generate(prompts, length, 6, options), single.generate(prompts, length, 6, options)
    )

    cluster.save(str(tmp_path), {"said": 1})
    cluster.wait()
    loaded = CausalTransformer(CONFIG, init=False)
    aux = loaded.restore(str(tmp_path))
    loaded.close()
    assert aux is not None
    assert aux["said"] == 1
    assert loaded.step == 4
    cluster.load(str(tmp_path))
    assert cluster.step == 0
    assert cluster.restore(str(tmp_path)) == aux
    assert cluster.step == 4


@pytest.mark.slow
def test_running_batch_matches_a_single_process(cluster, single):
    rng = np.random.default_rng(2)
    cluster.init()
    single.init()
    batches = cluster_batch, single_batch = cluster.batch(4), single.batch(4)
    # Host 0 has rows 0 and 1, so it gets most rows of some inserts and none of others.
    for rows, steps in (([1, 2, 0], 3), ([3], 5), ([2, 0], 1), ([2, 3], 9)):
        count = len(rows)
        prompts = [rng.integers(0, VOCAB, rng.integers(1, 40)) for _ in rows]
        options = {"seed": rng.integers(0, 99, count), "top_p": rng.uniform(0.2, 1, count)}
        options |= {"temp": rng.choice([0.0, 0.8, 1.3], count), "top_k": rng.integers(0, 9, count)}
        settings, lengths = sampler_settings(options, count), rng.integers(1, 12, count)
        arguments = (rows, prompts, lengths, settings)
        assert_same(*(batch.insert(*arguments, alternatives=ALTERNATIVES) for batch in batches))
        valid = np.arange(steps) < cluster_batch.left[:, None]  # undefined past a row's end
        alternatives, allowed = (None, None) if steps == 1 else (ALTERNATIVES, {})
        if steps == 5:  # a row of each host may generate two tokens only
            allowed = {row: bits_of(rng.integers(0, VOCAB, 2), VOCAB) for row in (1, 3)}
            valid[[1, 3], 1:] = False
        chosen = [batch.decode(steps, alternatives, allowed=allowed) for batch in batches]
        assert_same(*jax.tree.map(lambda x: x[valid], chosen))  # noqa: B023
        np.testing.assert_array_equal(cluster_batch.left, single_batch.left)

    for bad, message in (([VOCAB], "outside the vocabulary"), ([], "one integer token id")):
        with pytest.raises(InputError, match=message):
            cluster_batch.insert(
                [0, 3], [np.array([1]), np.array(bad, int)], 3, sampler_settings({}, 2)
            )
    with pytest.raises(InputError, match="steps is 33, expected 1 to 32"):
        cluster_batch.decode(33)
    with pytest.raises(InputError, match="has 3 rows, expected a positive multiple of 2, the num"):
        cluster.batch(3)
    cluster.batch(2)
    with pytest.raises(InputError, match="a newer batch has replaced this one on the hosts"):
        cluster_batch.decode(1)


def assert_same(actual: Any, expected: Any) -> None:
    """Compare two `Chosen`: tokens exactly, logprobs within 1e-5.

    The logprobs differ because several processes add in a different order than one.
    """
    np.testing.assert_array_equal(actual.token, expected.token)
    for name in ("logprob", "top_logprob"):
        if getattr(expected, name) is not None:
            np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"chunk": 4, "fixed_shapes": True, "speculate": 2}], ids=["", "features"]
)
def test_engine_over_hosts_matches_a_single_process(cluster, single, options):
    cluster.init()
    single.init()
    has_features = bool(options)
    engine = Engine(cluster, Metrics(4), rows=4, **options)
    engine.start()
    clients = random_clients(8, seed=3, n_vocab=VOCAB, logprobs=True)
    # Equal beginnings, which chunks take from earlier prompts.  The first prompt is longer than the
    # window, so only its end is used.
    for client, most in zip(clients, [40, *[6] * 7], strict=True):
        client.request.prompt = np.concatenate((np.arange(9), client.request.prompt[:most]))
    scored = Client(np.arange(9), 0, score=True)
    engine.submit([client.request for client in [*clients, scored]])
    for client in clients:
        request = client.request
        options, length = request.settings.options(), np.array([len(request.prompt)])
        tokens = single.generate(request.prompt[None], length, request.length, options)[0]
        assert client.numbers() == tokens.tolist()
    prompt = scored.news.get(timeout=SECONDS).prompt
    expected = single.score(np.arange(9)[None], ALTERNATIVES)
    # As above, the hosts add in a different order.
    np.testing.assert_allclose([t.logprob for t in prompt[1:]], expected.logprob[0], atol=1e-5)
    engine.close()
    assert any(client.request.cached for client in clients) == has_features


@pytest.mark.slow
def test_adapters_over_hosts_match_a_single_process(cluster, single, tmp_path):
    single.init()
    single.save(tmp_path / "base")
    single.wait()
    paths = [str(tmp_path / f"adapter_{rank}") for rank in (1, 3)]
    for rank, path in zip((1, 3), paths, strict=True):
        network = CausalTransformer(CONFIG.replace(lora_rank=rank), init=False)
        network.load(tmp_path / "base")
        network.state = random_factors(network.state, rank)
        network.save(path)
        network.close()
    cluster.load(str(tmp_path / "base"), only_params=True)
    rng, rows = np.random.default_rng(4), 6
    prompts, lengths = rng.integers(0, VOCAB, (rows, 20)), rng.integers(1, 21, rows)
    options = {"seed": np.arange(rows), "adapter": np.array([0, 1, 2, 2, 0, 1])}
    for network in (cluster, single):
        network.add_adapters(paths)
    answers = [network.generate(prompts, lengths, 9, options) for network in (cluster, single)]
    np.testing.assert_array_equal(*answers)
    for number in range(3):
        scored = (
            network.score(prompts[:, :17], 3, adapter=number) for network in (cluster, single)
        )
        assert_same(*scored)
    with pytest.raises(InputError, match="adapter is 3, expected 0"):
        cluster.score(prompts[:, :17], 3, adapter=3)
    for network in (cluster, single):
        network.load(str(tmp_path / "base"), only_params=True)
        assert network.adapters == 0


@pytest.mark.slow
def test_weights_that_are_not_finite_are_named_by_all_hosts_together(cluster, tmp_path):
    damaged = CausalTransformer(CONFIG)
    assert damaged.state is not None
    head = damaged.state["params"]["proj"]["projection/head"]
    head["b"] = head["b"].at[3].set(np.nan)
    damaged.save(tmp_path)
    damaged.close()
    cluster.load(str(tmp_path), only_params=True)
    named = r"NaN or infinite: 1 of the \d+ values of the weights proj/projection/head/b are NaN"
    tokens = np.arange(2 * VOCAB).reshape(-1, 8)[:5] % VOCAB
    for _ in range(2):
        with pytest.raises(NonFiniteError, match=named):
            cluster.score(tokens, 3)
        with pytest.raises(NonFiniteError, match=named):
            cluster.generate(tokens, [8] * 5, 4)
    cluster.init()
    assert np.isfinite(cluster.score(tokens, 3).logprob).all()


@pytest.mark.slow
@pytest.mark.parametrize("layers", [CONFIG.layers, 1])
def test_a_draft_over_hosts_changes_no_token(cluster, single, layers, tmp_path):
    """The draft is the model itself, or a smaller one."""
    for network in (cluster, single):
        network.init()
    draft = CausalTransformer(CONFIG.replace(layers=layers))
    draft.save(tmp_path)
    draft.close()
    rng, rows, guesses = np.random.default_rng(5), 6, 3
    prompts = [rng.integers(0, VOCAB, n) for n in (3, 20, 1, 9, 16, 12)]
    lengths = rng.integers(20, 40, rows)
    settings = sampler_settings({"seed": np.arange(rows), "temp": np.linspace(0, 1, rows)}, rows)
    expected, _ = answers(single.batch(rows), prompts, lengths, settings, False)
    cluster.add_draft(str(tmp_path))
    batch = cluster.batch(rows, guesses=guesses)
    assert answers(batch, prompts, lengths, settings, False)[0] == expected
    actual, steps = answers(batch, prompts, lengths, settings, True)
    assert actual == expected
    if layers == CONFIG.layers:  # all guesses are right
        assert steps == 2 * -(-(max(lengths) - 1) // (2 * (1 + guesses)))


@pytest.mark.slow
def test_eval_tasks_run_during_training(cluster, single, tmp_path, monkeypatch, capsys):
    """The scores match those of a single process, and of eval_harness.py on the checkpoint.

    Each step is evaluated only once, also when the run is restarted.
    """
    values = run_values(tmp_path, total_steps=4, val_every=2, ckpt_every=3, eval_harness_limit=6)
    monkeypatch.chdir(made_tasks.FOLDER)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    tasks = {"eval_harness_tasks": ["choice.yaml", "generation.yaml", "rolling.yaml"]}
    config = Config(**values, **tasks, tokenizer=made_tasks.save_tokenizer(tmp_path / "tokenizer"))
    for network in (cluster, single):
        monkeypatch.setattr(network, "config", config)
        monkeypatch.setattr(network, "close", network.wait)
    monkeypatch.setattr(cluster, "kill", lambda: None)  # which `RestartingCluster.close` calls
    single_folder, folder = str(tmp_path / "one"), str(tmp_path / "many")
    loop.train(single, single_folder)
    loop.train(cluster, folder)
    rows = rows_of(folder)
    shutil.rmtree(tmp_path / "many" / "step_4")  # as if the run was killed during this save
    loop.train(cluster, folder)
    assert_same_rows(rows_of(folder), rows)
    for actual, expected in zip(rows, rows_of(single_folder), strict=True):
        assert actual == pytest.approx(expected, rel=OTHER_PROCESSES)
    scores = {name[5:]: value for name, value in rows[-1].items() if name.startswith("eval/")}
    assert scores.keys() == {name[5:] for name in rows[1] if name.startswith("eval/")}
    required = {"made_choice/acc_stderr", "made_generation/chrf", "made_rolling/bits_per_byte"}
    assert required < scores.keys()
    assert not [name for row in rows[::2] for name in row if name.startswith("eval/")]

    hosts = contextlib.nullcontext(lambda: cluster.hosts)
    monkeypatch.setattr("mesh_transformer.cli.machines.machines_of", lambda *_: hosts)
    monkeypatch.setattr("mesh_transformer.cli.machines.build_model", lambda *_, **__: cluster)
    output = tmp_path / "told.json"
    path = write_config(tmp_path / "config.json", config.as_dict())
    flags = ["--config", path, "--model-path", folder, "--limit", "6", "--local-hosts", "2"]
    # The hosts have saved the config with which they were started, and so another tokenizer.
    flags += ["--set", f"tokenizer={config.tokenizer}"]
    monkeypatch.setattr("sys.argv", ["eval_harness.py", *flags, "--output", str(output)])
    eval_harness.main()
    assert harness.metric_values(json.loads(output.read_text())) == pytest.approx(scores, rel=1e-6)
    capsys.readouterr()
    validation.validate(single, folder)
    printed = capsys.readouterr().out
    assert "|made_choice" in printed
    assert "perplexity" in printed


def test_bad_input_raises_one_line_and_the_cluster_stays_usable(cluster):
    batch = random_batch(CONFIG, 2, 3)
    with pytest.raises(InputError, match="a microbatch has 3 sequences, expected a multiple of 2,"):
        cluster.train(batch)
    with pytest.raises(
        InputError, match=r"^obs holds token id 64, outside the vocabulary"
    ) as error:
        cluster.eval({name: np.full((2, 4), VOCAB) for name in ("obs", "target")})
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="ctx_length has values from 1 to 5, expected 1 to 4"):
        cluster.generate(np.zeros((2, 4), int), [1, 5], 3)
    with pytest.raises(InputError, match="gen_length is 0, expected at least 1"):
        cluster.generate(np.zeros((2, 4), int), [1, 4], 0)
    with pytest.raises(InputError, match="unknown sampler option 'heat'"):
        cluster.generate(np.zeros((2, 4), int), [1, 4], 3, {"heat": 1})
    with pytest.raises(InputError, match="nowhere"):
        cluster.load("nowhere/at_all")
    assert len(cluster.eval(random_batch(CONFIG, 2))["loss"]) == 2


def test_folder_that_hosts_do_not_share_is_refused(cluster, monkeypatch, tmp_path):
    second = cluster.members[1]
    monkeypatch.setattr(second, "disks", "of another machine")
    cluster._check_shared(str(tmp_path / "shared"))
    assert list((tmp_path / "shared").iterdir()) == []
    cluster._check_shared("gs://bucket/model")
    unseen: Future[bool] = Future()
    unseen.set_result(False)
    send = second.send
    monkeypatch.setattr(
        second, "send", lambda name, own: unseen if name == "marker_exists" else send(name, own)
    )
    monkeypatch.setattr(cluster, "kill", lambda: None)
    with pytest.raises(
        InputError, match="shared: host 1 does not see a file of host 0 in this folder; give"
    ):
        cluster.restore(str(tmp_path / "shared"))
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_killed_host_is_named_and_all_hosts_end(machines, host):
    cluster = build_model(CONFIG, machines())
    cluster.init()
    pids = list(cluster._pids)
    cluster.train(random_batch(CONFIG, 2, 4))
    os.kill(pids[host], signal.SIGKILL)
    # The current step may or may not finish; the next one cannot.
    later = cluster.train(random_batch(CONFIG, 2, 4))
    with pytest.raises(HostError, match=f"host {host} died"):
        float(later["loss"])
    wait_until(lambda: not any(map(is_alive, pids)), "the end of all hosts")
    with pytest.raises(HostError, match=rf"have been shut down \(host {host} died"):
        cluster.batch(2)
    cluster.close()


@pytest.mark.slow
def test_hosts_with_different_losses_are_shut_down(machines):
    cluster = build_model(CONFIG, machines())
    cluster.init()
    agreed = cluster._merge_reports
    loss = {"loss": float("nan")}
    measured = [StepReport(1, 0.5, loss, 0, False), StepReport(1, 0.25, dict(loss), 0, False)]
    assert agreed(1, measured)["host_seconds/1"] == 0.25
    with pytest.raises(
        HostError, match=r"disagree after step 1: host 0 is at step 1 with loss 0\.5, host 1 is"
    ):
        agreed(
            1,
            [StepReport(1, 0.5, {"loss": value}, 0, False) for value in (0.5, 0.5000000000000001)],
        )
    assert cluster.ended


@pytest.mark.slow
def test_number_of_unread_steps_is_limited(cluster):
    first, count = cluster.step, 3 * MOST_UNREAD
    steps = [cluster.train(random_batch(CONFIG, 2, 4, seed=seed)) for seed in range(count)]
    assert len(cluster._unread) == MOST_UNREAD
    assert all(np.isfinite(float(metrics["loss"])) for metrics in steps)
    assert cluster.step == first + count


@pytest.mark.slow
def test_host_that_hangs_at_startup_is_named_and_ends(machines, monkeypatch):
    monkeypatch.setattr("mesh_transformer.pod.cluster.SECONDS_TO_START", 15.0)
    # Over 95 %, the error would also name this machine's disk.
    monkeypatch.setattr("mesh_transformer.pod.cluster.spill_disk_is_full", lambda: False)
    (head,) = sessions_of(os.getpid())

    def runners() -> list[int]:
        processes = members(head).items()
        return [pid for pid, title in processes if title.startswith("ray::NetworkRunner")]

    before, stopped = set(runners()), []

    def stop_one() -> None:
        (pid, *_) = wait_until(lambda: set(runners()) - before, "a host's process")
        os.kill(pid, signal.SIGSTOP)
        stopped.append(pid)

    thread = threading.Thread(target=stop_one)
    thread.start()
    # On a busy machine, the other host may not have started either.
    silent = r"^host [01] does not answer(; host 1 does not answer)?$"
    with pytest.raises(HostError, match=silent):
        build_model(CONFIG, machines())
    thread.join()
    # Ray itself ends a process that was still starting, after a few seconds.
    wait_until(
        lambda: not is_alive(stopped[0]) and set(runners()) <= before, "end of all hosts", 20.0
    )


@pytest.mark.slow
def test_a_cluster_falls_back_to_the_newest_intact_step(machines, tmp_path, capsys):
    config = Config(**run_values(tmp_path, ckpt_every=2, val_batches=0))

    def train(folder: str, steps: int, **options: Any) -> None:
        def make() -> Any:
            return build_model(config, machines(), heartbeat=30)

        restarts.train(make, str(tmp_path / folder), max_steps=steps, **options)

    train("whole", 6)
    train("run", 4)
    damage_step(tmp_path / "run" / "step_4")
    message = r"step_4.* or use step_2, .* step before it; --fall-back resumes from that step"
    with pytest.raises(InputError, match=message):
        train("run", 6)
    train("run", 6, fall_back=True)
    assert "falling back to step_2, step_4.damaged is kept" in capsys.readouterr().err
    assert_same_rows(rows_of(tmp_path / "run"), rows_of(tmp_path / "whole"))


@pytest.mark.slow
def test_vanished_machine_is_named_and_replaced(machines):
    from mesh_transformer.pod.hosts import joined_hosts

    def make() -> Any:
        # Retried like `restarts.train`, because Ray may at first list the old machine as alive.
        for _ in range(8):
            with contextlib.suppress(HostError):
                (remote,) = joined_hosts(["127.0.0.2"], 60.0)
                hosts = [machines()[0], dataclasses.replace(remote, devices=4)]
                # On a busy machine, a host that compiles may not answer for some seconds.
                return build_model(CONFIG, hosts, heartbeat=30)
            time.sleep(2)
        raise AssertionError("the new machine was never used")

    batch, losses = random_batch(CONFIG, 2, 4), []
    for _ in range(2):
        with other_node("127.0.0.2"):
            cluster = make()
            cluster.init()
            local_pid = cluster._pids[0]
            losses.append(float(cluster.train(batch)["loss"]))
            vanish("127.0.0.2")
            began = time.monotonic()
            with pytest.raises(HostError, match=r"host 1 (died|does not answer)") as caught:
                float(cluster.train(batch)["loss"])
            print(f"{time.monotonic() - began:.1f} s: {caught.value}")
            wait_until(lambda: not is_alive(local_pid), "end of the other host")  # noqa: B023
    assert losses[0] == losses[1]


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory) -> tuple[str, Path]:
    return uninterrupted(tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
def test_run_recovers_from_every_kind_of_interruption(complete_run, tmp_path):
    """One run meets every kind of interruption: the first before any checkpoint, the rest after."""
    plan = [
        Interruption("SIGKILL", 3, 0),
        Interruption("raylet", 8),
        Interruption("SIGSTOP", 13, 1),
        Interruption("SIGTERM", 18, 1),
        Interruption("exception", 23, 0),
    ]
    assert {interruption.kind for interruption in plan} == {*KINDS, "raylet"}
    for interruption, outcome in zip(plan, interrupt(*complete_run, tmp_path, plan), strict=True):
        print(f"{interruption}: {outcome.seconds:.1f} s; {outcome.line}")


@pytest.mark.slow
def test_interrupted_save_is_never_restored(tmp_path):
    moments = ("data", "the arrays' commit file", "a deletion")
    for line in interrupted_saves(tmp_path, count=3, last=12, moments=moments):
        print(line)
