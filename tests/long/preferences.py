"""DPO with SmolLM2: does it prefer right sums, and has the reference equal bits from each source?

    python -m tests.long.preferences [SEED ...]

Trains on the pairs of docs/assistant.md.  Prints in how many of 104 held-out pairs the answer with
the right sum has the higher log-probability per token, before and after.  Then the first seed is
trained again with the reference from its file, and from the checkpoint.  It took 6 minutes on 2
cores.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from mesh_transformer.config import Config
from mesh_transformer.training.references import validate
from mesh_transformer.transformer_shard import CausalTransformer
from tests.support.pages import reader, runnable
from tests.support.smollm2 import model_path

RECORDS = """
mesh-transformer completion-records pairs.jsonl pairs --output-dir . \
  --tokenizer smollm2.gguf --seq 80 --preferences pairs
mesh-transformer completion-records held_out.jsonl held_out --output-dir . \
  --tokenizer smollm2.gguf --seq 80 --preferences pairs
mesh-transformer config --base smollm2.gguf --train pairs.index --output dpo.json \
  --set objective=dpo --set lora_rank=16 --set per_replica_batch=8 --set total_steps=20 \
  --set lr=3e-4 --set end_lr=0 --set anneal_steps=18 --set val_every=20 \
  --set 'val_set={"held_out": "held_out.index"}' \
  --set val_batches=13 --set ckpt_every=100 --set seq=80
"""


def train(person: Any, folder: str, seed: int, reference: str = "base") -> list[dict[str, Any]]:
    """Train as a command does, and return its rows without times."""
    command = (
        f"mesh-transformer train --config dpo.json --tune-model-path smollm2.gguf "
        f"--set model_dir={folder} --set seed={seed} --set reference={reference}"
    )
    person.run(dataclasses.replace(runnable("docs/assistant.md")[0], language="bash", text=command))
    rows = map(json.loads, Path("runs", folder, "metrics.jsonl").read_text().splitlines())
    return [
        {key: x for key, x in row.items() if "second" not in key and "_per_" not in key}
        for row in rows
    ]


def accuracy(path: str) -> float:
    """Return the share of held-out pairs whose chosen answer is more likely per token."""
    config = Config.load("dpo.json").replace(objective="simpo", beta=None)
    (metrics,) = validate(CausalTransformer(config, init=False), path).values()
    return metrics["rewards/accuracy"]


def main(seeds: list[int]) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        reader(Path(folder), patch) as person,
    ):
        Path("smollm2.gguf").symlink_to(model_path())
        data = runnable("docs/assistant.md")[0]
        person.run(data)
        pair, terms = person.names["pair"], person.names["terms"]
        for name, part in (("pairs", terms[160:320]), ("held_out", terms[1400:1504])):
            rows = [json.dumps(pair(a, b)) + "\n" for a, b in part]
            Path(f"{name}.jsonl").write_text("".join(rows))
        person.run(dataclasses.replace(data, language="bash", text=RECORDS))
        runs = {seed: train(person, f"seed{seed}", seed) for seed in seeds}
        before = accuracy("smollm2.gguf")
        for seed, rows in runs.items():
            after = accuracy(f"runs/seed{seed}")
            rewards = rows[-1]["val/rewards/accuracy_held_out"]
            print(
                f"seed {seed}: the right sum is more likely in {before:.1%} of the pairs before, "
                f"{after:.1%} after; its reward is higher in {rewards:.1%}",
                flush=True,
            )
            assert after > before
        first = seeds[0]
        assert train(person, "stored", first) == runs[first]
        file = Path("pairs.reference.json")
        written = file.read_bytes()
        file.unlink()
        assert train(person, "checkpoint", first, "smollm2.gguf") == runs[first]
        assert file.read_bytes() == written
        print("equal bits from the base model under adapters, from the file and from a checkpoint")


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]] or [0, 1, 2])
