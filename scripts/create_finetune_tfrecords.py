"""Create TFRecords of token sequences from text files; see `--help`."""

from mesh_transformer.util import main_of, run_script

main = main_of("mesh_transformer.cli.text_records")

if __name__ == "__main__":
    run_script(main)
