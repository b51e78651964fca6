"""Benchmark training, checkpoints and record reading on this machine; see docs/benchmarks.md."""

from mesh_transformer.cli.benchmark import main
from mesh_transformer.util import run_script

if __name__ == "__main__":
    run_script(main)
