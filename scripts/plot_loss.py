"""Plot the training and validation losses of a run from its metrics.jsonl.

The same as `mesh-transformer plot`.
"""

from mesh_transformer.cli.plot import main
from mesh_transformer.util import run_script

if __name__ == "__main__":
    run_script(main)
