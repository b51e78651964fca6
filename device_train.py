"""Train or score a model on this machine's devices.

Resumes stopped runs.

The same as `mesh-transformer train`.
"""

from mesh_transformer.util import main_of, run_script

main = main_of("mesh_transformer.cli.train")

if __name__ == "__main__":
    run_script(main)
