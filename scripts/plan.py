"""Predict whether training or generation fits a TPU, without having one; see docs/plan.md."""

from mesh_transformer.cli.plan import main
from mesh_transformer.util import run_script

if __name__ == "__main__":
    run_script(main)
