"""Converts a checkpoint of any format to any other; see `--help`."""

from mesh_transformer.cli.convert import main
from mesh_transformer.util import run_script

if __name__ == "__main__":
    run_script(main)
