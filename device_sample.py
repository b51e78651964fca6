"""Generate text with a trained model, for one --prompt or for prompts that are typed in.

The same as `mesh-transformer sample`.
"""

from mesh_transformer.util import main_of, run_script

main = main_of("mesh_transformer.cli.sample")

if __name__ == "__main__":
    run_script(main)
