"""Score a trained model with lm-eval's tasks; print a table, and write JSON with --output.

The same as `mesh-transformer eval`.
"""

from mesh_transformer.cli.evaluate import main
from mesh_transformer.util import run_script

if __name__ == "__main__":
    run_script(main)
