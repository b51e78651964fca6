"""Convert a checkpoint between any two formats; see `--help`."""

from mesh_transformer.util import main_of, run_script

main = main_of("mesh_transformer.cli.convert")

if __name__ == "__main__":
    run_script(main)
