"""The commands of docs/gpt-j.md, run on tiny models with the file names that they use."""

from pathlib import Path

import jax
import numpy as np
import pytest

from mesh_transformer.checkpoint import hf, original
from mesh_transformer.config import Config
from mesh_transformer.transformer_shard import CausalTransformer
from tests.support.documents import new_place, python_commands, run_here

# Additional flags for the commands, because records and answers as long as GPT-J's take time.
SHORTER = {"scripts/create_finetune_tfrecords.py": ["--seq", "32"]}
SAMPLERS = ("device_sample.py", "resharding_example.py")
TINY = {"layers": 2, "d_model": 32, "n_heads": 8, "pe_rotary_dims": 4, "seq": 32}
TINY |= {"total_steps": 2, "gradient_accumulation_steps": 1, "tpu_size": 8}


@pytest.mark.slow
def test_the_commands_run(tmp_path, monkeypatch, capsys):
    new_place(tmp_path, monkeypatch, ("6B_roto_256.json", "example_config.json"), **TINY)
    config = Config.load("configs/6B_roto_256.json")
    state = jax.tree.map(np.asarray, CausalTransformer(config).state)
    original.write("model", state, config)
    Path("model/step_0").rename("step_383500")
    hf.write("gpt-j-6b", state, config)
    hf.write("cut", state, config, trim_vocab=True)

    page_commands = python_commands("gpt-j.md")
    assert len(page_commands) >= 8
    # The document also describes the last command for a model whose vocabulary was trimmed.
    (to_shards,) = (words for words in page_commands if "from_hf" in words)
    for_trimmed = (
        " ".join(to_shards).replace("gpt-j-6b", "cut").replace("from_hf", "from_cut").split()
    )
    page_commands.append([*for_trimmed, "--config", "configs/6B_roto_256.json"])
    for script, *flags in page_commands:
        shorter = ["--length", "4"] if script in SAMPLERS else SHORTER.get(script, [])
        run_here([script, *flags, *shorter], monkeypatch, capsys)
    printed = capsys.readouterr().out
    assert printed.count("EleutherAI is") == 2
    assert "logits differ by" in printed
    assert {path.name for path in Path().iterdir()} > {
        "exported",
        "exported_slim",
        "from_hf",
        "from_cut",
        "runs",
    }
