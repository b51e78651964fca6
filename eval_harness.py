"""Score a trained model with lm-eval's tasks; print a table, and write JSON with --output.

The same as `mesh-transformer eval`.
"""

from mesh_transformer.util import main_of, run_script

main = main_of("mesh_transformer.cli.evaluate")

if __name__ == "__main__":
    run_script(main)
