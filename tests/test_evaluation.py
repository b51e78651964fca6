"""lm-eval's questions: what batches and padding may not change, and whole tasks."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import eval_harness
from mesh_transformer import evaluation
from mesh_transformer.evaluation import NetworkLM
from mesh_transformer.tokenizer import load_tokenizer
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError
from tests.conftest import SMALL

TASKS = Path(__file__).parent / "data/eval_tasks"
WORDS = ["the", "king", "of", "england", "speaks", "and", "nobody", "said", "in", "winter"]
SEQ = 32


@pytest.fixture(scope="module")
def model() -> NetworkLM:
    """A small model of real tokens, of sharp opinions, on 4 x 2 devices."""
    changes = {"n_vocab": 50400, "seq": SEQ, "per_replica_batch": 2}
    network = CausalTransformer(SMALL | changes | {"tpu_size": 8, "cores_per_replica": 2})
    assert network.state is not None
    network.state["params"] = jax.tree.map(lambda x: 2 * x, network.state["params"])
    return NetworkLM(network, load_tokenizer())


def asked(*args):
    return SimpleNamespace(args=args)


def words(rng, count):
    return " ".join(rng.choice(WORDS, count))


def logprobs(model, tokens):
    """Of each token but the first, and which argmax would say: a pass for this text alone."""
    logits = np.asarray(model.network.logits(np.array([tokens[:-1]])), np.float64)[0]
    shifted = logits - logits.max(axis=-1, keepdims=True)
    found = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found[np.arange(len(tokens) - 1), tokens[1:]], logits.argmax(axis=-1)


def test_a_continuation_s_logprob_is_that_of_its_text_alone(model):
    rng = np.random.default_rng(0)
    pairs = [(words(rng, rng.integers(1, 50)), " " + words(rng, n)) for n in range(1, 14)]
    pairs.append(("", "What"))  # what follows nothing follows an end of text
    pairs.append(("winter ", "rain"))  # a space at the end belongs to what is said
    for context, _ in pairs[:3]:  # what the model would say itself
        tokens = model.tok_encode(context)[-SEQ:]
        best = logprobs(model, [*tokens, 0])[1][-1]
        pairs.append((context, model.tokenizer.decode([best])))
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


def test_answers_end_where_their_task_says(model):
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
            np.repeat(prompt, 4, 0), [prompt.shape[1]] * 4, 10, {"temp": 0.0, "top_p": 1.0}
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


def test_what_cannot_be_asked(model):
    with pytest.raises(InputError, match="num_beams is not known"):
        model.generate_until([asked("x", {"num_beams": 4})])
    with pytest.raises(InputError, match=f"answers of {SEQ} tokens.*max_gen_toks lower"):
        model.generate_until([asked("x", {"max_gen_toks": SEQ})])
    with pytest.raises(InputError, match=f"expected 1 to seq {SEQ}"):
        model.loglikelihood([asked("x", " king" * 40)], disable_tqdm=True)


@pytest.mark.slow
def test_the_script_scores_whole_tasks(model, tmp_path, monkeypatch, capsys):
    """On one device what the model says on eight, of every kind of task."""
    monkeypatch.chdir(TASKS)  # where the tasks look for their questions
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    names = ["made_choice", "made_generation", "made_rolling"]
    tasks = evaluation.tasks_of(names, ".")
    with pytest.raises(InputError, match="no task 'no_such_task'"):
        evaluation.tasks_of(["no_such_task"], ".")
    wanted = evaluation.evaluate(model.network, model.tokenizer, tasks, limit=3)
    model.network.save(str(tmp_path / "model"))
    model.network.wait()
    command = ["eval_harness.py", "--model-path", str(tmp_path / "model"), "--include-path", "."]
    output = tmp_path / "results.json"

    def run(*options: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [*command, *options, "--output", str(output)])
        eval_harness.main()
        return json.loads(output.read_text())["results"]

    found = run("--tasks", ",".join(names), "--limit", "3")
    for name in names:
        for metric, value in wanted["results"][name].items():
            # The mesh is another: f32 sums in another order.
            assert found[name][metric] == (
                pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            )
    assert "acc_stderr,none" in found["made_choice"]
    assert "|made_choice" in capsys.readouterr().out
    assert found["made_choice"]["sample_len"] == 3
