"""Train or score a model on this machine's devices.

Resumes stopped runs.

The same as `mesh-transformer train`.
"""

from mesh_transformer.cli.train import main
from mesh_transformer.util import run_script

if __name__ == "__main__":
    run_script(main)
