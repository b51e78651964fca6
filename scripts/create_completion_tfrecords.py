"""Create TFRecords from prompts and their completions; see `--help`."""

from mesh_transformer.cli.completion_records import main
from mesh_transformer.util import run_script

if __name__ == "__main__":
    run_script(main)
