"""Train or score a model over many hosts.

Recovers from failed hosts, and resumes stopped runs.

The same as `mesh-transformer pod`.
"""

from mesh_transformer.util import main_of, run_script

main = main_of("mesh_transformer.cli.pod")

if __name__ == "__main__":
    run_script(main)
