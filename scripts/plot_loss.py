"""Plot the training and validation losses of a run from its metrics.jsonl.

The same as `mesh-transformer plot`.
"""

from mesh_transformer.util import main_of, run_script

main = main_of("mesh_transformer.cli.plot")

if __name__ == "__main__":
    run_script(main)
