"""Write Shakespeare, character by character; some minutes on two cores.

Run `python examples/characters.py [FILE]`; the default text is the repository's own.  It writes
characters.png.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import mesh_transformer
from mesh_transformer.data.record_set import read_text

CONFIG = {
    "block": "gpt2",
    "layers": 3,
    "d_model": 128,
    "n_heads": 4,
    "seq": 96,
    "dtype": "float32",
    "per_replica_batch": 24,
    "lr": 2e-3,
    "end_lr": 1e-4,
    "warmup_steps": 50,
    "total_steps": 800,
    "dropout_residual": 0.1,
}
