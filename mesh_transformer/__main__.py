"""Runs the mesh-transformer command: `python -m mesh_transformer COMMAND ...`."""

from mesh_transformer.cli import main as cli
from mesh_transformer.util import run_script


def main() -> None:
    run_script(cli.main)


if __name__ == "__main__":
    main()
