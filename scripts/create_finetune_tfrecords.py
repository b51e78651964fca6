"""Create TFRecords of token sequences from text files; see `--help`."""

from mesh_transformer.cli.text_records import main
from mesh_transformer.util import run_script

if __name__ == "__main__":
    run_script(main)
