"""Predict whether training or generation fits a TPU, without having one; see docs/plan.md."""

from mesh_transformer.util import main_of, run_script

main = main_of("mesh_transformer.cli.plan")

if __name__ == "__main__":
    run_script(main)
