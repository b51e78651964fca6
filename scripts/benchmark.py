"""Benchmark training, checkpoints and record reading on this machine; see docs/benchmarks.md."""

from mesh_transformer.util import main_of, run_script

main = main_of("mesh_transformer.cli.benchmark")

if __name__ == "__main__":
    run_script(main)
