"""Sources, which resolve the path of a checkpoint once per load."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

import mesh_transformer
from mesh_transformer.checkpoint.source import Source
from mesh_transformer.generation.sampling_settings import check_defaults
from mesh_transformer.transformer_shard import CausalTransformer
from mesh_transformer.util import InputError

_counters: list[Callable[[str], None]] = []


def _count(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open":
        for counter in _counters:
            counter(str(arguments[0]))


sys.addaudithook(_count)  # hooks cannot be removed; this one does nothing without a counter


@pytest.fixture
def opened(monkeypatch) -> Counter[str]:
    """The number of times that Python has opened each file."""
    counts: Counter[str] = Counter()
    monkeypatch.setattr(sys.modules[__name__], "_counters", [lambda path: counts.update([path])])
    return counts


def metadata_of(step: Path) -> list[str]:
    """List a step's metadata files: all but the arrays and the markers of completeness."""
    files = (path for path in step.rglob("*") if path.is_file())
    excluded = ("commit_success.txt", "_CHECKPOINT_METADATA", "_sharding", "manifest.ocdbt")
    return [str(p) for p in files if p.name not in excluded and p.parent.name != "d"]


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
def test_native_load_reads_each_metadata_file_once(small, tmp_path, opened, adapters):
    folders = [tmp_path / "base", *([tmp_path / "adapters"] if adapters else [])]
    for folder in folders:
        lora = {"lora_rank": 2} if folder.name == "adapters" else {}
        network = CausalTransformer(small(tpu_size=1, cores_per_replica=1, **lora), init=not lora)
        if lora:
            network.load(folders[0])
        network.save(str(folder))
        network.close()
    config = small(tpu_size=1, cores_per_replica=1, lora_rank=2) if adapters else None
    opened.clear()
    mesh_transformer.load(folders[-1], config)
    for folder in folders:
        counts = {path: opened[path] for path in metadata_of(folder / "step_0")}
        assert max(counts.values()) == 1, counts
        # aux, checksums and the tree of the state; Orbax's per-array metadata is not needed.
        assert sum(counts.values()) == 3, counts
        assert opened[str(folder / "meta.json")] <= 1


@pytest.mark.slow
def test_source_does_not_change_when_a_newer_step_is_saved(small, tmp_path):
    network = CausalTransformer(small(tpu_size=1, cores_per_replica=1))
    network.save(str(tmp_path))
    network.wait()
    source = Source(tmp_path)
    network.step = 1
    network.save(str(tmp_path))
    network.close()
    assert source.checkpoint_path == str(tmp_path / "step_0")
    assert Source(tmp_path).checkpoint_path == str(tmp_path / "step_1")
    assert Source.of(source) is source


def test_missing_path_is_a_one_line_error(tmp_path):
    with pytest.raises(InputError, match=rf"{tmp_path}/no does not exist; expected a model folder"):
        Source(tmp_path / "no")


@pytest.mark.slow
def test_a_deleted_step_is_replaced_by_the_newest_one(small, tmp_path, capsys):
    """As when a server's hosts restart while training goes on in the same folder."""
    network = CausalTransformer(small(tpu_size=1, cores_per_replica=1), devices=jax.devices()[:1])
    network.save(tmp_path)
    network.wait()
    source, first = Source(tmp_path), tmp_path / "step_0"
    assert source.existing_path() == source.checkpoint_path == str(first)
    first.rename(tmp_path / "step_3")
    assert source.existing_path() == str(tmp_path / "step_3")
    assert f"{first} was deleted; loading {tmp_path}/step_3" in capsys.readouterr().err
    network.close()


def test_the_models_own_sampling_settings(tmp_path):
    """Those in generation_config.json; where they are wrong, what samples refuses them."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "gptj", "n_layer": 1, "n_embd": 16, "n_head": 2, "rotary_dim": 8, '
        '"vocab_size": 9}'
    )
    assert Source(tmp_path).config.sampling == {}
    path = tmp_path / "generation_config.json"
    path.write_text(
        '{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": null, "max_length": 9}'
    )
    assert Source(tmp_path).config.sampling == {"temp": 0.6, "top_k": 20}
    path.write_text('{"do_sample": true, "temperature": "hot"}')
    with pytest.raises(
        InputError, match=r"generation_config.json: temp is 'hot', expected a number"
    ):
        _ = Source(tmp_path).config
    for wrong in ("-1", "NaN"):
        path.write_text(f'{{"do_sample": true, "temperature": {wrong}}}')
        sampling = Source(tmp_path).config.sampling
        with pytest.raises(InputError, match=r"sampling: .*temp is .*expected a number"):
            check_defaults(sampling)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("SmolLM2", "SmolLM2"),
        ("models--org--a-b/snapshots/0123", "org/a-b"),
        ("SmolLM2/step_0", "SmolLM2"),
        ("model.Q4_1.gguf", "model.Q4_1"),
    ],
)
def test_a_model_has_the_name_of_its_folder_or_file(tmp_path, path, name):
    kind = "gguf" if path.endswith(".gguf") else "hf"
    assert Source(tmp_path / path, kind).name == name
