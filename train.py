"""Train or score a model over many hosts.

Recovers from failed hosts, and resumes stopped runs.

The same as `mesh-transformer pod`.
"""

from mesh_transformer.cli.pod import main
from mesh_transformer.util import run_script

if __name__ == "__main__":
    run_script(main)
