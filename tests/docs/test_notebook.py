"""The unmodified notebook, run with a model that was converted to Hugging Face's format."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from mesh_transformer.checkpoint import conversion
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.transformer_shard import CausalTransformer, load

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_notebook_samples_from_a_converted_model(tmp_path, monkeypatch):
    config = {"layers": 1, "d_model": 32, "n_heads": 4, "n_vocab": 50400, "seq": 64}
    network = CausalTransformer(config | {"pe_rotary_dims": 8, "dtype": "float32"})
    network.save(str(tmp_path / "native"))
    network.close()
    monkeypatch.setenv("MODEL", "../hf")  # relative to the notebook's folder
    conversion.convert(str(tmp_path / "native"), "native", str(tmp_path / "hf"), "hf")
    notebook = nbformat.read(ROOT / "notebooks" / "sample.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.get("outputs") for cell in notebook.cells)  # committed without outputs
    (tmp_path / "notebooks").mkdir()
    resources = {"metadata": {"path": str(tmp_path / "notebooks")}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    printed = "".join(
        output["text"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output["output_type"] == "stream" and output["name"] == "stdout"
    )
    tokens = load_tokenizer()("ROMEO:")["input_ids"]
    [answer] = load(str(tmp_path / "hf")).generate([tokens], [len(tokens)], 32, {"temp": 0})
    assert repr("ROMEO:" + load_tokenizer().decode(answer)) in printed
