"""Generate text with a trained model, for one --prompt or for prompts that are typed in.

The same as `mesh-transformer sample`.
"""

from mesh_transformer.cli.sample import main
from mesh_transformer.util import run_script

if __name__ == "__main__":
    run_script(main)
