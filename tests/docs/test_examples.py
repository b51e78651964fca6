"""The programs in examples/ and the notebook of them."""

import math
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import mesh_transformer
from mesh_transformer.checkpoint import conversion
from mesh_transformer.data.tokenizer import load_tokenizer
from tests.support.live_server import Live
from tests.support.pages import ROOT

EXAMPLES = ROOT / "examples"
FEW = {"total_steps": 40, "warmup_steps": 5, "val_every": 20, "val_batches": 2}
# What a demo's score after 40 steps must lie between: better than guessing, and not too good.
SCORES = {"addition": (-1, 0.5), "characters": (2, 5), "digits": (0.5, 2.2), "words": (2, 4.5)}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs Python code in a folder of its own, and returns its output.

    It runs as a user's does: with the compiler's optimisations, which tests switch off.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{EXAMPLES}")
    monkeypatch.setenv("MPLBACKEND", "agg")

    def run(code: str) -> str:
        program = [sys.executable, "-c", code]
        ended = subprocess.run(program, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        return ended.stdout

    return run


def test_examples_are_read_in_a_minute():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text("utf-8").splitlines()) <= 80, path.name


@pytest.mark.slow
def test_addition_passes_its_exam(run):
    score = run("import addition; print('score', addition.main())").rpartition("score ")[2]
    assert float(score) >= 0.99
    assert Path("addition.png").stat().st_size > 5000


@pytest.mark.slow
def test_gpt2_is_tuned_and_exported(run):
    pytest.importorskip("torch").manual_seed(0)
    config = GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2, vocab_size=50257)
    GPT2LMHeadModel(config).save_pretrained("gpt2")
    load_tokenizer().save_pretrained("gpt2")
    code = "import gpt2_finetune as demo; print('score', *demo.main('gpt2', lr=1e-2, end_lr=1e-3))"
    losses = [*map(float, run(code).rpartition("score ")[2].split())]
    assert losses[-1] < losses[0] - 0.5
    loaded = GPT2LMHeadModel.from_pretrained("gpt2-tuned/hf")
    assert loaded.config.n_positions == 64
    difference, bound = conversion.compare_with_torch("gpt2-tuned/hf")
    assert difference < bound
    assert Path("finetune.png").stat().st_size > 5000


@pytest.mark.slow
def test_pythia_goes_to_a_mesh_and_back(run):
    torch = pytest.importorskip("torch")
    from tests.support.torch_models import torch_model

    torch_model(
        "gpt_neox", layers=2, heads=8, rotary=4, vocab=101, dtype=torch.float16
    ).save_pretrained("pythia")
    printed = run("import pythia_mesh as demo; print('score', demo.main('pythia'))")
    # 1e-5: losses of up to some tens, in f32, whose sums differ in order.
    assert float(printed.rpartition("score ")[2]) < 1e-5
    assert "28 of 28 exported tensors have the bits of the imported ones" in printed
    assert Path("pythia_mesh.png").stat().st_size > 5000


@pytest.mark.slow
def test_a_llama_of_ones_own_is_served_from_a_gguf_file(run):
    """transformers, which reads the same file, is the oracle; in f32, logits differ by rounding."""
    torch = pytest.importorskip("torch")
    few = {"layers": 2, "total_steps": 4, "warmup_steps": 1, "val_every": 4, "val_batches": 1}
    lines = [
        "from mesh_transformer.model.flops import n_params",
        "import own_llama as demo",
        "count = n_params(demo.mesh_transformer.Config.of(demo.CONFIG))",
        f"demo.CONFIG.update({few})",
        "print('score', demo.main(), count)",
    ]
    loss, count = map(float, run("\n".join(lines)).rpartition("score ")[2].split())
    assert 14.5e6 < count < 15.5e6
    assert loss < math.log(4096)
    network = mesh_transformer.load("own_llama/model.gguf", changes={"dtype": "float32"})
    tokenizer = load_tokenizer("own_llama/tokenizer")
    tokens = tokenizer("To be, or not to be")["input_ids"]
    theirs = AutoModelForCausalLM.from_pretrained("own_llama", gguf_file="model.gguf")
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0].numpy()
    live = Live(network, tokenizer, None, rows=2)
    try:
        answer = live.ask(prompt=tokens, max_tokens=1, temperature=0, logprobs=1)["choices"][0]
    finally:
        live.close()
        network.close()
    assert answer["text"] == tokenizer.decode([expected[-1].argmax()])
    likely = expected[-1].max() - np.log(np.exp(expected[-1].astype(np.float64)).sum())
    assert answer["logprobs"]["token_logprobs"][0] == pytest.approx(likely, abs=1e-4)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")  # steps would take longer than their compilation
    monkeypatch.delenv("MPLBACKEND", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "notebooks/examples.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.get("outputs") for cell in notebook.cells)  # committed without outputs
    lines = [f"{name}.CONFIG.update({FEW})" for name in SCORES]
    notebook.cells.insert(2, nbformat.v4.new_code_cell("\n".join(lines)))
    folder = tmp_path / "notebooks"
    folder.mkdir()
    (tmp_path / "examples").symlink_to(EXAMPLES)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=1800, kernel_name="python3", resources=resources).execute()
    assert {path.stem for path in folder.glob("*.png")} == {*SCORES}
    for name, (low, high) in SCORES.items():
        (cell,) = (cell for cell in notebook.cells if cell.source == f"{name}.main()")
        data = [output.get("data", {}) for output in cell.outputs]
        assert sum("image/png" in one for one in data) == 1
        (score,) = (one["text/plain"] for one in data if "image/png" not in one and one)
        assert low < float(score) < high, name
