"""lm-eval tasks: logprobs and answers in batches, and scores against lm-eval's HF model."""

import argparse
import builtins
import functools
import itertools
import json
import math
import os
import re
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
from mesh_transformer.cli import evaluate
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.evaluation import harness, network_lm
from mesh_transformer.evaluation import tasks as lm_eval_tasks
from mesh_transformer.evaluation.harness import Harness
from mesh_transformer.evaluation.network_lm import NetworkLM
from mesh_transformer.generation.sampling import SamplingOptions
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import HostError, InputError, brief
from tests.conftest import SMALL
from tests.support import made_tasks

WORDS = ["the", "king", "of", "england", "speaks", "and", "nobody", "said", "in", "winter"]
SEQ = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> NetworkLM:
    """Return a small model with large weights, on 4 x 2 devices."""
    tokenizer = made_tasks.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    changes = {"n_vocab": 64, "seq": SEQ, "per_replica_batch": 2, "tokenizer": tokenizer}
    changes |= {"lr": 5e-3, "anneal_steps": 100, "adam_eps": 1e-8}
    network = CausalTransformer(SMALL | changes | {"tpu_size": 8, "cores_per_replica": 2})
    assert network.state is not None
    network.state["params"] = jax.tree.map(lambda x: 2 * x, network.state["params"])
    return NetworkLM(network, load_tokenizer(tokenizer))


def make_request(*args):
    return SimpleNamespace(args=args)


def words(rng, count):
    return " ".join(rng.choice(WORDS, count))


def logprobs(model, tokens):
    """Return the logprob of each token except the first, and the argmax at each position.

    They come from a forward pass of this text alone.  Texts of all lengths are padded to one
    length, so that they share one compilation; no token attends to the padding after it.
    """
    padded = np.zeros((1, SEQ), int)
    padded[0, : len(tokens) - 1] = tokens[:-1]
    logits = np.asarray(model.network.logits(padded), np.float64)[0, : len(tokens) - 1]
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result[np.arange(len(tokens) - 1), tokens[1:]], logits.argmax(axis=-1)


@pytest.mark.slow
def test_batching_does_not_change_the_logprobs_of_continuations(model):
    rng = np.random.default_rng(0)
    pairs = [(words(rng, rng.integers(1, 50)), " " + words(rng, n)) for n in range(1, 14)]
    pairs.append(("", "What"))  # an empty context is an end-of-text token
    pairs.append(("winter ", "rain"))  # a space at the end belongs to the continuation
    likeliest = []  # continuations that the model itself would choose, if they start a new word
    while len(likeliest) < 3:
        context = words(rng, rng.integers(1, 50))
        best = logprobs(model, [*model.tok_encode(context)[-SEQ:], 0])[1][-1]
        if (continuation := model.tokenizer.decode([best])).startswith(" "):
            likeliest.append((context, continuation))
    pairs += likeliest
    answers = model.loglikelihood([make_request(*pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (actual, greedy) in zip(pairs, answers, strict=True):
        before = model.tok_encode(context.rstrip())
        continuation_tokens = model.tok_encode(context + continuation)[len(before) :]
        tokens = [*(before or [model.eot_token_id]), *continuation_tokens][-SEQ - 1 :]
        expected, best = logprobs(model, tokens)
        # In f32, logits of up to 16 differ by up to 2e-5 between widths, and up to 14 are summed.
        assert actual == pytest.approx(expected[-len(continuation_tokens) :].sum(), abs=1e-4)
        assert greedy == (best[-len(continuation_tokens) :].tolist() == continuation_tokens)
    assert [greedy for _, greedy in answers[-3:]] == [True] * 3
    assert not all(greedy for _, greedy in answers)


@pytest.mark.slow
def test_common_beginnings_do_not_change_the_logprobs(model, monkeypatch):
    """Two questions with many examples in common, of which each has several answers."""
    rng = np.random.default_rng(6)
    examples = words(rng, 18)
    contexts = [f"{examples} {words(rng, 4)}" for _ in range(200)] + [words(rng, 5)]
    pairs = [(context, " " + words(rng, 2)) for context in contexts for _ in range(2)]
    requests = [make_request(*pair) for pair in pairs]
    score, sizes = model.network.score, []

    def counted(tokens, alternatives, beginning):
        sizes.append((len(beginning), tokens.shape))
        return score(tokens, alternatives, beginning)

    monkeypatch.setattr(model.network, "score", counted)
    actual = model.loglikelihood(requests, disable_tqdm=True)
    beginning = len(model.tok_encode(examples))
    assert {size for size, _ in sizes} == {beginning}
    assert sum(rows for _, (rows, _) in sizes) >= 400
    monkeypatch.setattr(network_lm, "common_beginnings", lambda *args, **kwargs: [])
    sizes.clear()
    expected = model.loglikelihood(requests, disable_tqdm=True)
    assert not sizes
    # In f32, logits of up to 16 differ by up to 2e-5 between widths, and a few are summed.
    np.testing.assert_allclose(
        [logprob for logprob, _ in actual], [logprob for logprob, _ in expected], atol=1e-4
    )
    assert [greedy for _, greedy in actual] == [greedy for _, greedy in expected]


@pytest.mark.slow
def test_exact_scores_are_equal_at_all_batch_sizes(model):
    rng = np.random.default_rng(8)
    examples = words(rng, 14)  # that some texts begin with
    contexts = [words(rng, rng.integers(1, 24)) for _ in range(24)]
    contexts += [f"{examples} {words(rng, 4)}" for _ in range(24)]
    requests = [make_request(context, " " + words(rng, rng.integers(1, 8))) for context in contexts]
    texts = [make_request(words(rng, count)) for count in (3, 40, 90)]

    def scores(rows: int, *, exact: bool) -> list[Any]:
        keys = {"n_vocab": 64, "seq": SEQ, "tpu_size": 1, "per_replica_batch": rows, "exact": exact}
        network = CausalTransformer(SMALL | keys, devices=jax.devices()[:1])
        own = NetworkLM(network, model.tokenizer)
        rolling = own.loglikelihood_rolling(texts, disable_tqdm=True)
        return own.loglikelihood(requests, disable_tqdm=True) + rolling

    expected = scores(1, exact=True)
    for rows in (3, 8, 32):
        assert scores(rows, exact=True) == expected
    assert scores(1, exact=False) != scores(32, exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_are_those_that_are_scored(model, bits, monkeypatch):
    """Alone, with a common beginning, and after a host has failed."""
    exact = model.network
    changes = {"weight_bits": bits, "d_model": 128, "cores_per_replica": 2}
    network = CausalTransformer(exact.config.replace(**changes))
    assert network.state is not None
    network.state["params"] = jax.tree.map(lambda x: 2 * x, network.state["params"])
    quantized = NetworkLM(network, model.tokenizer, share=False)
    rng = np.random.default_rng(7)
    requests = [make_request(words(rng, 8), " " + words(rng, 3)) for _ in range(20)]
    score, failures = network.score, [HostError("a host has failed")]

    def failing(*args):
        if failures:
            raise failures.pop()
        return score(*args)

    monkeypatch.setattr(network, "score", failing)
    answers = quantized.loglikelihood(requests, disable_tqdm=True)
    for request, (actual, greedy) in zip(requests, answers, strict=True):
        context, continuation = request.args
        tokens = np.array(model.tok_encode(context + continuation))
        size = len(tokens) - len(model.tok_encode(context))
        chosen = score(tokens[None], 1)
        # In f32, logits of up to 16 differ by up to 2e-5 between widths, and a few are summed.
        assert actual == pytest.approx(chosen.logprob[0, -size:].sum(), abs=1e-4)
        assert greedy == np.array_equal(chosen.top_token[0, -size:, 0], tokens[-size:])
    other = CausalTransformer(network.config.replace(weight_bits=None))
    other.state = network.state
    others = NetworkLM(other, model.tokenizer).loglikelihood(requests, disable_tqdm=True)
    assert np.abs(np.subtract([a for a, _ in answers], [b for b, _ in others])).min() > 1e-4
    shared = NetworkLM(network, model.tokenizer).loglikelihood(requests, disable_tqdm=True)
    np.testing.assert_allclose([a for a, _ in shared], [a for a, _ in answers], atol=1e-4)


@pytest.mark.parametrize("seed", range(30))
def test_groups_save_as_much_as_any_choice_of_intervals(seed):
    """The reference tries all ways to divide the sorted texts into groups."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 2, rng.integers(3, 12)).tolist() for _ in range(rng.integers(1, 10))]
    limited = seed % 2 == 1
    most = [int(rng.integers(0, len(text))) if limited else len(text) for text in texts]
    copies, overhead = int(rng.integers(1, 3)), int(rng.integers(0, 4))
    order = sorted(range(len(texts)), key=texts.__getitem__)

    def saved(group):
        columns = zip(*(texts[index] for index in group), strict=False)
        equal = itertools.takewhile(lambda column: len(set(column)) == 1, columns)
        length = min([len(list(equal)), *(most[index] for index in group)])
        return (len(group) - copies) * length - overhead, length

    @functools.cache
    def best(begin):
        if begin == len(order):
            return 0
        ends = range(begin + 1, len(order) + 1)
        return max(max(0, saved(order[begin:end])[0]) + best(end) for end in ends)

    groups = network_lm.common_beginnings(texts, most, copies, overhead)
    members = [index for _, group in groups for index in group]
    assert len(members) == len(set(members))
    total = 0
    for length, group in groups:
        gain, longest = saved(group)
        assert length == longest
        assert gain > 0
        total += gain
    assert total <= best(0)
    if not limited:
        assert total == best(0)


def test_a_long_text_is_scored_in_windows(model):
    rng = np.random.default_rng(1)
    texts = [words(rng, count) for count in (1, SEQ // 2, SEQ, SEQ + 1, 3 * SEQ, 3 * SEQ + 5)]
    actual = model.loglikelihood_rolling([make_request(text) for text in texts], disable_tqdm=True)
    for text, total in zip(texts, actual, strict=True):
        tokens = [model.eot_token_id, *model.tok_encode(text)]
        expected = 0.0
        for begin in range(0, len(tokens) - 1, SEQ):
            window = tokens[max(0, min(begin, len(tokens) - 1 - SEQ)) : begin + SEQ + 1]
            new = min(SEQ, len(tokens) - 1 - begin)
            expected += logprobs(model, window)[0][-new:].sum()
        assert total == pytest.approx(expected, rel=1e-5)  # the same rounding as above


@pytest.mark.slow
def test_generated_answers_follow_the_options_of_the_task(model, monkeypatch):
    rng = np.random.default_rng(2)
    contexts = [words(rng, count) for count in (1, 3, 9, 20, 40, 2, 5, 7, 11)]

    def answers(**options):
        options = {"max_gen_toks": 10, "do_sample": False} | options
        requests = [make_request(context, options) for context in contexts]
        return model.generate_until(requests, disable_tqdm=True)

    free = answers()
    for context, text in zip(contexts, free, strict=True):
        prompt = np.array([model.tok_encode(context)[-(SEQ - 10) :]])
        tokens = model.network.generate(
            np.repeat(prompt, 8, 0), [prompt.shape[1]] * 8, 10, {"temp": 0.0, "top_p": 1.0}
        )[0]
        expected = model.tokenizer.decode(tokens.tolist()).partition("<|endoftext|>")[0]
        assert text == expected
    stops = [free[0][4:6], free[3][2:5]]
    assert answers(until=stops) == [
        text[: min((text + stops[0]).find(stops[0]), (text + stops[1]).find(stops[1]))]
        for text in free
    ]
    assert answers(temperature=0.7, do_sample=True) != free
    assert answers(temperature=0.0, do_sample=True, top_k=1) == free
    # A task may repeat a question: the draws differ within a run, but not between runs.
    sampled = {"max_gen_toks": 10, "do_sample": True, "temperature": 1.0}
    repeats = [make_request(contexts[0], sampled)] * 9
    first, again = (model.generate_until(repeats, disable_tqdm=True) for _ in range(2))
    assert first == again
    assert len(set(first)) > 4
    failures = [HostError("host 1 died")]
    batch = model.network.batch

    def failing(rows):
        if failures:
            raise failures.pop()
        return batch(rows)

    monkeypatch.setattr(model.network, "batch", failing)
    assert answers() == free  # retried on new hosts
    failures += [HostError("host 1 died")] * 2
    with pytest.raises(HostError):
        answers()


def test_unsupported_requests_are_refused(model):
    with pytest.raises(InputError, match="num_beams is not supported"):
        model.generate_until([make_request("x", {"num_beams": 4})])
    with pytest.raises(InputError, match=f"answers of {SEQ} tokens .* lower max_gen_toks"):
        model.generate_until([make_request("x", {"max_gen_toks": SEQ})])
    with pytest.raises(InputError, match=rf"expected 1 to {SEQ} \(the model's seq\)"):
        model.loglikelihood([make_request("x", " king" * 40)], disable_tqdm=True)


@pytest.fixture
def tasks(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(made_tasks.FOLDER)  # the tasks read their questions from this folder
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    harness.load_harness.cache_clear()
    return [f"{name.removeprefix('made_')}.yaml" for name in made_tasks.NAMES]


def train(model) -> None:
    """Train until the model has memorised half of the tasks' answers."""
    end, texts = model.eot_token_id, []
    for document in made_tasks.documents("choice")[::2]:
        texts.append(
            model.tok_encode(document["question"] + document["choices"][document["answer"]])
        )
    for document in made_tasks.documents("generation")[:3]:
        answer = model.tok_encode(" " + document["answer"])
        texts.append([*model.tok_encode(document["text"])[-(SEQ - 12) :], *answer, end])
    rows = np.zeros((16, SEQ + 1), np.uint32)
    for row, text in zip(rows, texts, strict=False):
        row[: len(text)] = text[-SEQ - 1 :]
    model.network.init()
    sample = {"obs": rows[None, :, :-1], "target": rows[None, :, 1:]}
    model.network.batch(8)
    losses = [model.network.train(sample)["loss"] for _ in range(60)]
    assert float(losses[-1]) < 0.2 * float(losses[0])
    assert model.network._generator._made is None  # training keeps no weights for generation


def hf_scores(folder: str, names: list[str], rows: int = 4, **options: Any) -> dict[str, float]:
    """Return the scores that lm-eval computes with its own Hugging Face model."""
    pytest.importorskip("torch")
    from lm_eval.models.huggingface import HFLM

    model = HFLM(folder, device="cpu", dtype="float32", batch_size=rows, max_length=SEQ)
    results: Any = lm_eval.simple_evaluate(
        model,
        tasks=names,
        task_manager=TaskManager(include_path=".", include_defaults=False),
        bootstrap_iters=1000,
        log_samples=False,
        **options,
    )
    return harness.metric_values(results)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["random", "trained"])
def test_scores_match_the_hugging_face_model_of_lm_eval(
    model, tasks, tmp_path, monkeypatch, capsys, weights
):
    """Compare with the exported weights: on a mesh and, if trained, by the script on one device."""
    if weights == "trained":
        train(model)
    network, folder = model.network, str(tmp_path / "hf")
    hf.write(folder, jax.tree.map(np.asarray, network.state), network.config)
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")  # a forked process would break JAX's threads
    expected = hf_scores(folder, made_tasks.NAMES)
    tasks_harness = Harness(network.config, tasks)
    actual, again = (tasks_harness.results(network) for _ in range(2))
    assert actual == again
    assert tasks_harness.results(network, lambda: True) is None
    all_results = [actual]
    if weights == "trained":
        config = network.config.replace(tpu_size=1, cores_per_replica=1).as_dict()
        (tmp_path / "one.json").write_text(json.dumps(config))
        command = ["--config", str(tmp_path / "one.json"), "--model-path", folder]
        command += ["--include-path", ".", "--tasks", ",".join(made_tasks.NAMES)]
        monkeypatch.setattr(sys, "argv", ["", *command, "--output", str(tmp_path / "told.json")])
        eval_harness.main()
        assert "|made_choice" in capsys.readouterr().out
        all_results.append(json.loads((tmp_path / "told.json").read_text()))
    for numbers in map(harness.metric_values, all_results):
        assert numbers.keys() == expected.keys()
        for name, value in expected.items():
            # Word perplexities are in the thousands, so their tolerance is relative: 1e-4.
            assert numbers[name] == pytest.approx(value, rel=1e-4 * (value > 1), abs=1e-4), name
    metrics = {"acc", "acc_stderr", "acc_norm", "exact_match", "chrf", "chrf_stderr"}
    metrics |= {"word_perplexity", "byte_perplexity", "bits_per_byte"}
    assert metrics <= {name.split("/")[1] for name in expected}
    shares = {"made_choice/acc", "made_choice/acc_norm"}
    if weights == "trained":
        shares.add("made_generation/exact_match")
        assert expected["made_rolling/bits_per_byte"] < 3
    assert all(0 < expected[name] < 1 for name in shares)


TEMPLATE = "{% for m in messages %} {{ m.role }} {{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %} said{% endif %}"


@pytest.mark.slow
def test_a_chat_template_and_other_settings_have_the_effect_of_lm_evals(
    model, tasks, tmp_path, monkeypatch
):
    network, folder = model.network, str(tmp_path / "hf")
    hf.write(folder, jax.tree.map(np.asarray, network.state), network.config)
    tokenizer = load_tokenizer(made_tasks.save_tokenizer(tmp_path / "tokenizer"))
    tokenizer.chat_template = TEMPLATE
    for place in (folder, tmp_path / "tokenizer"):
        tokenizer.save_pretrained(place)
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")  # a forked process would break JAX's threads
    names, changes = made_tasks.NAMES[:2], {"max_new_tokens": 3, "max_gen_toks": 4}
    expected = hf_scores(
        folder, names, apply_chat_template=True, num_fewshot=1, gen_kwargs=changes, limit=6
    )
    config = network.config.replace(tokenizer=str(tmp_path / "tokenizer"))
    options: dict[str, Any] = {"num_fewshot": 1, "gen_kwargs": changes, "limit": 6}
    chat = Harness(config, tasks[:2], template="", log_samples=True, **options)
    results = chat.results(network)
    assert results is not None
    assert harness.metric_values(results) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    harness.write(str(tmp_path / "out.json"), results)
    assert "samples" not in json.loads((tmp_path / "out.json").read_text())
    for name in names:
        lines = (tmp_path / f"out_samples_{name}.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        documents = made_tasks.documents(name.removeprefix("made_"))
        assert [sample["doc_id"] for sample in samples] == list(range(min(6, len(documents))))
        for sample in samples:
            for context, *_ in sample["arguments"]:
                assert context.startswith(" user ")
                assert context.endswith(" said")
                assert " assistant " in context  # the example's answer is a message
    (tmp_path / "file.jinja").write_text(TEMPLATE)
    for template in ("plain", str(tmp_path / "file.jinja")):
        Harness(network.config, tasks[:2], template=template, limit=1)
    with pytest.raises(InputError, match="--apply-chat-template: the tokenizer has no chat templ"):
        Harness(network.config, tasks[:2], template="", limit=1)


def test_tasks_that_run_code_require_a_confirmation(model, tasks, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    unsafe = tmp_path / "unsafe.yaml"
    unsafe.write_text((made_tasks.FOLDER / "generation.yaml").read_text() + "unsafe_code: true\n")
    with pytest.raises(InputError, match=r"made_generation runs code.* --confirm-unsafe-c"):
        Harness(model.network.config, [str(unsafe)], limit=1)
    assert "HF_ALLOW_CODE_EVAL" not in os.environ
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "0")
    Harness(model.network.config, [str(unsafe)], limit=1, unsafe_code=True)
    assert os.environ["HF_ALLOW_CODE_EVAL"] == "1"


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 7, "num_beams": 1},
        {"max_tokens": 7, "num_return_sequences": 1, "early_stopping": True},
        {"max_completion_tokens": 7, "length_penalty": 1.0, "until": None, "temperature": None},
        {"max_gen_toks": 7, "max_new_tokens": 9, "max_tokens": 8},
    ],
)
def test_keys_of_lm_evals_other_models_are_accepted(options):
    plain, same = (network_lm._Generation(given) for given in ({"max_gen_toks": 7}, options))
    assert vars(same) == vars(plain)


def test_settings_of_generation_reach_the_sampler():
    settings = {"top_p": 0.5, "top_k": 3, "min_p": 0.25, "typical_p": 0.75}
    settings["repetition_penalty"] = 1.5
    options = network_lm._Generation({"temperature": 0.5, **settings}).options(3)
    assert options == SamplingOptions(temp=0.5, seed=3, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        *(
            (key, [0, -5, 1.5, "8", True, [8], math.nan, 2**31], "a whole number from 1 to 214")
            for key in network_lm.LENGTH_KEYS
        ),
        ("temperature", [-1, math.nan, math.inf, "hot", [0.5], True], "a number of at least 0"),
        ("top_p", [7, -0.1, math.nan, "0.9", {}], "a number from 0.0 to 1.0"),
        ("typical_p", [1.5, -1], "a number from 0.0 to 1.0"),
        ("min_p", [2, "x"], "a number from 0.0 to 1.0"),
        ("top_k", [-1, 2.5, "5", False], "a whole number from 0 to 2147483647"),
        ("repetition_penalty", [0, -1, 1e9, "2"], "a number from 0.01 to 100.0"),
        ("do_sample", ["no", "", 0, 1, [True]], "true or false"),
        ("until", [5, [1], ["a", None], {"a": 1}, True], "a text, or a list of texts"),
    ],
)
def test_settings_of_generation_out_of_range_are_refused_in_one_line(key, values, expected):
    for value in values:
        with pytest.raises(InputError) as error:
            network_lm._Generation({"max_gen_toks": 3, "temperature": 0.5, key: value})
        found = re.escape(brief(repr(value)))
        assert re.fullmatch(
            rf"generation_kwargs: {key} is {found}, expected {re.escape(expected)}.*",
            str(error.value),
        )


def test_generation_settings_of_the_command_are_checked_before_a_model_is_loaded(model, tasks):
    for key, value in [("top_p", 7), ("max_gen_toks", 0), ("do_sample", "no")]:
        with pytest.raises(InputError, match=rf"^lm-eval's task \w+: generation_kwargs: {key} is "):
            Harness(model.network.config, tasks, gen_kwargs={key: value})


def test_generation_settings_are_parsed_as_in_lm_eval(monkeypatch, capsys):
    def parsed(*words: str) -> argparse.Namespace:
        monkeypatch.setattr(sys, "argv", ["eval", "--model-path", "m", *words])
        return evaluate.parse_args()

    for text, expected in (
        ("temperature=0.5,do_sample=True", {"temperature": 0.5, "do_sample": True}),
        ('until=["\\n", "a,b"],max_gen_toks=5', {"until": ["\n", "a,b"], "max_gen_toks": 5}),
        ("until=end", {"until": "end"}),
    ):
        assert parsed("--gen-kwargs", text).gen_kwargs == [expected]
    assert parsed("--gen-kwargs", "top_k=5", "top_p=1").gen_kwargs == [{"top_k": 5}, {"top_p": 1}]
    with pytest.raises(SystemExit):
        parsed("--gen-kwargs", "top_k")
    assert "expected KEY=VALUE" in capsys.readouterr().err
    assert parsed("--apply-chat-template").apply_chat_template == ""
    assert parsed("--apply-chat-template", "plain").apply_chat_template == "plain"
    assert parsed().apply_chat_template is None
    parsed("--log-samples")
    with pytest.raises(InputError, match="--log-samples requires --output"):
        evaluate.main()


def test_an_output_that_cannot_be_written_is_reported_at_once(monkeypatch, tmp_path):
    path = tmp_path / "missing" / "results.json"
    monkeypatch.setattr(sys, "argv", ["", "--model-path", "gone", "--output", str(path)])
    with pytest.raises(InputError, match=r"missing is no folder to write to; create it$"):
        evaluate.main()


def test_unusable_tasks_are_reported_before_a_model_is_loaded(model, tasks, monkeypatch):
    config = model.network.config
    with pytest.raises(InputError, match=r"^lm-eval's task made_choice: a continuation has \d tok"):
        Harness(config.replace(seq=2), tasks[:1])
    with pytest.raises(InputError, match=r"^lm-eval's task made_generation: answers of 12 tok"):
        Harness(config.replace(seq=12), tasks)
    # Do not index the thousands of tasks of lm-eval itself, which takes seconds.
    monkeypatch.setattr(
        lm_eval_tasks, "_manager", lambda path, shipped: TaskManager(None, path, False)
    )
    with pytest.raises(InputError, match=r"^lm-eval has no task 'no_such_task' \("):
        Harness(config, ["no_such_task"])
    with pytest.raises(InputError, match="--include-path nowhere: no such f"):
        Harness(config, tasks, include_path="nowhere")
    with pytest.raises(InputError, match="--limit or eval_harness_limit is 0, expected above 0"):
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
    with pytest.raises(InputError, match=r"tasks \(piqa\): package lm_eval is missing; .*\[eval\]"):
        harness.load_harness(config.replace(eval_harness_tasks=["piqa"]))
