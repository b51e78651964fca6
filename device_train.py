"""Trains a model on this machine's devices; starts again where it was interrupted."""

from mesh_transformer import training
from mesh_transformer.arguments import run_arguments, run_parser
from mesh_transformer.util import run_script


def main() -> None:
    config, folder, options = run_arguments(run_parser(__doc__).parse_args())

    from mesh_transformer.transformer_shard import CausalTransformer

    training.train(CausalTransformer(config, init=False), folder, **options)


if __name__ == "__main__":
    run_script(main)
