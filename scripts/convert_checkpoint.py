"""Convert a checkpoint between any two formats; see `--help`."""

from mesh_transformer.cli.convert import main
from mesh_transformer.util import run_script

if __name__ == "__main__":
    run_script(main)
