"""Serve a model over HTTP: OpenAI's completions API, mesh-transformer-jax's API and a web page.

The same as `mesh-transformer serve`.
"""

from mesh_transformer.util import main_of, run_script

main = main_of("mesh_transformer.cli.serve")

if __name__ == "__main__":
    run_script(main)
