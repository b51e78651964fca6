"""LoRA adapters that requests choose as their model, on a fake network."""

import numpy as np
import pytest

from mesh_transformer.checkpoint import native_state
from mesh_transformer.checkpoint.source import Source
from mesh_transformer.cli import serve
from mesh_transformer.cli import service as command
from mesh_transformer.config import Config
from mesh_transformer.generation.pool import Pool
from mesh_transformer.mesh.declaration import map_declared
from mesh_transformer.model import transformer
from mesh_transformer.serving.pages import Pages, Prompt
from mesh_transformer.util import InputError

pytest_plugins = ["tests.support.live_fixtures"]


@pytest.fixture(scope="module")
def live(serve):
    return serve(network={"window": 256}, adapters=["tuned", "other"], pooling="mean")


def test_models_are_listed_and_named_in_answers(live):
    listed = live.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["fake", "tuned", "other"]
    assert live.http.get("/v1/models/tuned").json()["id"] == "tuned"
    assert live.ask(prompt="a", model="tuned", max_tokens=2)["model"] == "tuned"
    status, error = live.refused({"prompt": "a", "model": "third"})
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "use 'fake' or 'tuned' or 'other'" in error["message"]


def test_the_network_gets_the_adapter_of_each_request(live):
    for number, model in enumerate(("fake", "tuned", "other")):
        live.ask(prompt=f"Hello {model}", model=model, max_tokens=2)
        assert live.network.settings.adapter_B.tolist() == [number]
        own = [number] if number else []
        live.ask(prompt="Hello you", model=model, max_tokens=1, echo=True, logprobs=1)
        assert ("score", 17, *own) in live.network.calls
        answer = live.http.post("/v1/embeddings", json={"input": "a", "model": model})
        assert answer.json()["model"] == model
        assert live.network.calls[-1] == ("embed", 16, "mean", *own)


def test_answers_end_at_the_end_tokens_of_their_adapter(serve, live):
    answer = live.network.answer(live.tokenizer("Hello")["input_ids"], 5, 40)
    end = answer[7]
    own = serve(network={"window": 256}, adapters=["tuned", "other"], ends={2: [end]})
    for model in ("fake", "tuned", "other"):
        (choice,) = own.ask(prompt="Hello", model=model, seed=5, max_tokens=40)["choices"]
        kept = answer[: answer.index(end)] if model == "other" else answer
        assert choice["text"] == live.tokenizer.decode(kept)
        assert choice["finish_reason"] == ("stop" if model == "other" else "length")


def test_the_end_tokens_of_native_adapters_are_read(tmp_path):
    for number, ends in enumerate((None, [7, 9])):
        config = Config(layers=1, d_model=16, n_heads=1, n_vocab=32, lora_rank=2, end_tokens=ends)
        declared = transformer.trained(config)
        params = map_declared(lambda d: np.zeros(d.shape, np.float32), declared)
        state = {"params": params, "step": np.zeros((), np.int32)}
        native_state.write(str(tmp_path / str(number)), state, config)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "adapter_config.json").write_text("{}")
    assert command.ends_of(Source(tmp_path / str(n)) for n in (0, 1, 2)) == {2: [7, 9]}


def test_kept_beginnings_belong_to_one_adapter(live):
    """A long prompt is kept once per adapter, and found again only with the same one."""
    prompt, cached = "word " * 100, []
    for model in ("fake", "tuned", "fake", "tuned", "other"):
        usage = live.ask(prompt=prompt, model=model, max_tokens=1)["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 96, 96, 0]


def test_the_keys_of_different_adapters_differ():
    pages, tokens = Pages(Pool(9, 2), 8), np.array([3, 1, 4, 1, 5, 9])
    pages.keep(pages.add_row(Prompt(tokens, 1), 8), Prompt(tokens, 1), 0, 6)
    assert len(pages.find(Prompt(tokens, 1))) == 2
    for other in (0, 2, 2**20):
        assert pages.find(Prompt(tokens, other)) == []


def test_names_are_parsed_and_must_differ(monkeypatch, capsys):
    def parsed(*words: str):
        monkeypatch.setattr("sys.argv", ["serve", "--model-path", "m", *words])
        return serve.parse_args()

    args = parsed("--adapter", "a=folder", "--adapter", "b=gs://bucket/x=1", "--name", "c")
    assert args.adapter == [("a", "folder"), ("b", "gs://bucket/x=1")]
    assert command.names_of(args, "model") == {"c": 0, "a": 1, "b": 2}
    assert command.names_of(parsed(), "model") == {"model": 0}
    several = parsed("--name", "d", "--adapter", "a=x", "--name", "c", "--name", "d")
    names = command.names_of(several, "model")
    assert list(names.items()) == [("d", 0), ("c", 0), ("a", 1)]
    for twice in (
        parsed("--adapter", "a=x", "--name", "b", "--name", "a"),
        parsed("--adapter", "a=x", "--adapter", "a=y", "--name", "b"),
    ):
        with pytest.raises(InputError, match="--adapter a: another model has this name"):
            command.names_of(twice, "model")
    with pytest.raises(InputError, match="--name is empty"):
        command.names_of(parsed("--name", ""), "model")
    for bad in ("folder", "=folder", "name="):
        with pytest.raises(SystemExit):
            parsed("--adapter", bad)
        assert "expected NAME=FOLDER" in capsys.readouterr().err
