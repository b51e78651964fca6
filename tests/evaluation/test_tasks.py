"""lm-eval's questions: what batches and padding may not change; whole tasks, beside hf's scores."""

import builtins
import json
import sys
from types import SimpleNamespace
from typing import Any

import jax
import lm_eval
import numpy as np
import pytest
from lm_eval.tasks import TaskManager

import eval_harness
from mesh_transformer.checkpoint import hf
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.evaluation import harness
from mesh_transformer.evaluation import tasks as lm_eval_tasks
from mesh_transformer.evaluation.harness import Harness
from mesh_transformer.evaluation.network_lm import NetworkLM
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import HostError, InputError
from tests.conftest import SMALL
from tests.support import made_tasks

WORDS = ["the", "king", "of", "england", "speaks", "and", "nobody", "said", "in", "winter"]
SEQ = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> NetworkLM:
    """A small model of sharp opinions, on 4 x 2 devices."""
    tokenizer = made_tasks.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    changes = {"n_vocab": 64, "seq": SEQ, "per_replica_batch": 2, "tokenizer": tokenizer}
    changes |= {"lr": 5e-3, "anneal_steps": 100, "adam_eps": 1e-8}
    network = CausalTransformer(SMALL | changes | {"tpu_size": 8, "cores_per_replica": 2})
    assert network.state is not None
    network.state["params"] = jax.tree.map(lambda x: 2 * x, network.state["params"])
    return NetworkLM(network, load_tokenizer(tokenizer))


def asked(*args):
    return SimpleNamespace(args=args)


def words(rng, count):
    return " ".join(rng.choice(WORDS, count))


def logprobs(model, tokens):
    """Of each token but the first, and which argmax would say: a pass for this text alone.

    One compilation serves texts of any length: those that come after a token it does not see.
    """
    padded = np.zeros((1, SEQ), int)
    padded[0, : len(tokens) - 1] = tokens[:-1]
    logits = np.asarray(model.network.logits(padded), np.float64)[0, : len(tokens) - 1]
    shifted = logits - logits.max(axis=-1, keepdims=True)
    found = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found[np.arange(len(tokens) - 1), tokens[1:]], logits.argmax(axis=-1)


def test_a_continuation_s_logprob_is_that_of_its_text_alone(model):
    rng = np.random.default_rng(0)
    pairs = [(words(rng, rng.integers(1, 50)), " " + words(rng, n)) for n in range(1, 14)]
    pairs.append(("", "What"))  # what follows nothing follows an end of text
    pairs.append(("winter ", "rain"))  # a space at the end belongs to what is said
    likeliest = []  # what the model would say itself, where that is a new word
    while len(likeliest) < 3:
        context = words(rng, rng.integers(1, 50))
        best = logprobs(model, [*model.tok_encode(context)[-SEQ:], 0])[1][-1]
        if (said := model.tokenizer.decode([best])).startswith(" "):
            likeliest.append((context, said))
    pairs += likeliest
    answers = model.loglikelihood([asked(*pair) for pair in pairs], disable_tqdm=True)
    for (context, said), (found, greedy) in zip(pairs, answers, strict=True):
        before = model.tok_encode(context.rstrip())
        own = model.tok_encode(context + said)[len(before) :]
        whole = [*(before or [model.eot_token_id]), *own][-SEQ - 1 :]
        wanted, best = logprobs(model, whole)
        # Logits of up to 16 differ by up to 2e-5 between widths, in f32; up to 14 are summed.
        assert found == pytest.approx(wanted[-len(own) :].sum(), abs=1e-4)
        assert greedy == (best[-len(own) :].tolist() == own)
    assert [greedy for _, greedy in answers[-3:]] == [True] * 3
    assert not all(greedy for _, greedy in answers)


def test_a_long_text_is_read_in_windows(model):
    rng = np.random.default_rng(1)
    texts = [words(rng, count) for count in (1, SEQ // 2, SEQ, SEQ + 1, 3 * SEQ, 3 * SEQ + 5)]
    found = model.loglikelihood_rolling([asked(text) for text in texts], disable_tqdm=True)
    for text, total in zip(texts, found, strict=True):
        tokens = [model.eot_token_id, *model.tok_encode(text)]
        wanted = 0.0
        for begin in range(0, len(tokens) - 1, SEQ):
            window = tokens[max(0, min(begin, len(tokens) - 1 - SEQ)) : begin + SEQ + 1]
            new = min(SEQ, len(tokens) - 1 - begin)
            wanted += logprobs(model, window)[0][-new:].sum()
        assert total == pytest.approx(wanted, rel=1e-5)  # as above


def test_answers_end_where_their_task_says(model, monkeypatch):
    rng = np.random.default_rng(2)
    contexts = [words(rng, count) for count in (1, 3, 9, 20, 40, 2, 5, 7, 11)]

    def answers(**options):
        options = {"max_gen_toks": 10, "do_sample": False} | options
        requests = [asked(context, options) for context in contexts]
        return model.generate_until(requests, disable_tqdm=True)

    free = answers()
    for context, text in zip(contexts, free, strict=True):
        prompt = np.array([model.tok_encode(context)[-(SEQ - 10) :]])
        tokens = model.network.generate(
            np.repeat(prompt, 8, 0), [prompt.shape[1]] * 8, 10, {"temp": 0.0, "top_p": 1.0}
        )[0]
        wanted = model.tokenizer.decode(tokens.tolist()).partition("<|endoftext|>")[0]
        assert text == wanted
    stops = [free[0][4:6], free[3][2:5]]
    assert answers(until=stops) == [
        text[: min((text + stops[0]).find(stops[0]), (text + stops[1]).find(stops[1]))]
        for text in free
    ]
    assert answers(temperature=0.7, do_sample=True) != free
    assert answers(temperature=0.0, do_sample=True, top_k=1) == free
    # A task may ask the same several times: other draws, but in another run the same.
    sampled = {"max_gen_toks": 10, "do_sample": True, "temperature": 1.0}
    repeats = [asked(contexts[0], sampled)] * 9
    first, again = (model.generate_until(repeats, disable_tqdm=True) for _ in range(2))
    assert first == again
    assert len(set(first)) > 4
    lost = [HostError("host 1 died")]
    batch = model.network.batch

    def failing(rows):
        if lost:
            raise lost.pop()
        return batch(rows)

    monkeypatch.setattr(model.network, "batch", failing)
    assert answers() == free  # from new hosts
    lost += [HostError("host 1 died")] * 2
    with pytest.raises(HostError):
        answers()


def test_what_cannot_be_asked(model):
    with pytest.raises(InputError, match="num_beams is not supported"):
        model.generate_until([asked("x", {"num_beams": 4})])
    with pytest.raises(InputError, match=f"answers of {SEQ} tokens .* lower max_gen_toks"):
        model.generate_until([asked("x", {"max_gen_toks": SEQ})])
    with pytest.raises(InputError, match=f"expected 1 to the model's seq {SEQ}"):
        model.loglikelihood([asked("x", " king" * 40)], disable_tqdm=True)


@pytest.fixture
def tasks(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(made_tasks.FOLDER)  # where the tasks look for their questions
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    harness.opened.cache_clear()
    return [f"{name.removeprefix('made_')}.yaml" for name in made_tasks.NAMES]


def train(model) -> None:
    """Until half of the tasks' answers are known by heart."""
    end, texts = model.eot_token_id, []
    for asked in made_tasks.documents("choice")[::2]:
        texts.append(model.tok_encode(asked["question"] + asked["choices"][asked["answer"]]))
    for asked in made_tasks.documents("generation")[:3]:
        answer = model.tok_encode(" " + asked["answer"])
        texts.append([*model.tok_encode(asked["text"])[-(SEQ - 12) :], *answer, end])
    rows = np.zeros((16, SEQ + 1), np.uint32)
    for row, text in zip(rows, texts, strict=False):
        row[: len(text)] = text[-SEQ - 1 :]
    model.network.init()
    sample = {"obs": rows[None, :, :-1], "target": rows[None, :, 1:]}
    model.network.batch(8)
    losses = [model.network.train(sample)["loss"] for _ in range(60)]
    assert float(losses[-1]) < 0.2 * float(losses[0])
    assert model.network._generator._made is None  # a copy of the weights, of no use to training


def hf_scores(folder: str, names: list[str]) -> dict[str, float]:
    """lm-eval's own, by its own model of Hugging Face's weights."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(folder, device="cpu", dtype="float32", batch_size=4, max_length=SEQ)
    found: Any = lm_eval.simple_evaluate(
        model,
        tasks=names,
        task_manager=TaskManager(include_path=".", include_defaults=False),
        bootstrap_iters=1000,
        log_samples=False,
    )
    return harness.numbers(found)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["random", "trained"])
def test_scores_are_those_of_lm_eval_s_hf_model(
    model, tasks, tmp_path, monkeypatch, capsys, weights
):
    """Of the same weights, exported; on a mesh, once also as the script says on one device."""
    if weights == "trained":
        train(model)
    network, folder = model.network, str(tmp_path / "hf")
    hf.write(folder, jax.tree.map(np.asarray, network.state), network.config)
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")  # as a fork would copy JAX's threads
    expected = hf_scores(folder, made_tasks.NAMES)
    asks = Harness(network.config, tasks)
    found, again = (asks.results(network) for _ in range(2))
    assert found == again
    assert asks.results(network, lambda: True) is None
    everywhere = [found]
    if weights == "trained":
        config = network.config.replace(tpu_size=1, cores_per_replica=1).as_dict()
        (tmp_path / "one.json").write_text(json.dumps(config))
        command = ["--config", str(tmp_path / "one.json"), "--model-path", folder]
        command += ["--include-path", ".", "--tasks", ",".join(made_tasks.NAMES)]
        monkeypatch.setattr(sys, "argv", ["", *command, "--output", str(tmp_path / "told.json")])
        eval_harness.main()
        assert "|made_choice" in capsys.readouterr().out
        everywhere.append(json.loads((tmp_path / "told.json").read_text()))
    for numbers in map(harness.numbers, everywhere):
        assert numbers.keys() == expected.keys()
        for name, value in expected.items():
            # Perplexities by words are in the thousands: 1e-4 of them.
            assert numbers[name] == pytest.approx(value, rel=1e-4 * (value > 1), abs=1e-4), name
    told = {"acc", "acc_stderr", "acc_norm", "exact_match", "chrf", "chrf_stderr"}
    told |= {"word_perplexity", "byte_perplexity", "bits_per_byte"}
    assert told <= {name.split("/")[1] for name in expected}
    shares = {"made_choice/acc", "made_choice/acc_norm"}
    if weights == "trained":
        shares.add("made_generation/exact_match")
        assert expected["made_rolling/bits_per_byte"] < 3
    assert all(0 < expected[name] < 1 for name in shares)


def test_a_task_that_cannot_be_asked_is_told_before_a_model_is_there(model, tasks, monkeypatch):
    config = model.network.config
    with pytest.raises(InputError, match=r"^lm-eval's task made_choice: a continuation has \d tok"):
        Harness(config.replace(seq=2), tasks[:1])
    with pytest.raises(InputError, match=r"^lm-eval's task made_generation: answers of 12 tok"):
        Harness(config.replace(seq=12), tasks)
    # Instead of lm-eval's own thousands of tasks, which are read for seconds.
    monkeypatch.setattr(
        lm_eval_tasks, "_manager", lambda path, shipped: TaskManager(None, path, False)
    )
    with pytest.raises(InputError, match=r"^lm-eval has no task 'no_such_task'; "):
        Harness(config, ["no_such_task"])
    with pytest.raises(InputError, match="--include-path nowhere: no such f"):
        Harness(config, tasks, include_path="nowhere")
    with pytest.raises(InputError, match="the limit on questions per task is 0, expected above 0"):
        Harness(config, tasks, limit=0)
    monkeypatch.chdir("..")
    with pytest.raises(
        InputError, match=r"tasks made_choice: FileNotFoundError: .*leave out the tasks"
    ):
        Harness(config, ["made_choice"], include_path="eval_tasks")
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("lm_eval"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    for module in ("tasks", "network_lm"):
        monkeypatch.delitem(sys.modules, f"mesh_transformer.evaluation.{module}", raising=False)
        monkeypatch.delattr(f"mesh_transformer.evaluation.{module}", raising=False)
    with pytest.raises(InputError, match=r"tasks \(piqa\): lm_eval is missing; pip install"):
        harness.opened(config.replace(eval_harness_tasks=["piqa"]))
