"""Follow docs/assistant.md with SmolLM2: SFT, DPO and GRPO must each raise the accuracy.

    python -m tests.long.assistant [SEED ...]

Prints the accuracy after each stage, with its 95 % interval.  After the last stage, the interval
must lie above that after SFT.  A seed takes about 8 minutes on 2 cores.
"""

import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import reader, runnable
from tests.support.smollm2 import model_path


def main(seed: int) -> None:
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        reader(Path(folder), patch) as person,
    ):
        Path("smollm2.gguf").symlink_to(model_path())
        for block in runnable("docs/assistant.md"):
            text = block.text.replace("--output add.json", f"--output add.json --set seed={seed}")
            person.run(dataclasses.replace(block, text=text))
        results: dict[str, dict[str, Any]] = person.names["results"]
    print(f"seed {seed}, {time.perf_counter() - began:.0f} s:")
    for model, result in results.items():
        low, high = result["interval"]
        print(f"{model:15} {result['mean']:6.1%} ({low:.1%} to {high:.1%})", flush=True)
    _, sft, dpo, grpo = results.values()
    assert sft["mean"] < dpo["mean"] < grpo["mean"]
    assert grpo["interval"][0] > sft["interval"][1]


if __name__ == "__main__":
    for argument in sys.argv[1:] or ["0"]:
        main(int(argument))
