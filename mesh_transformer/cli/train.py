"""Train or score a model on this machine's devices.

Resumes stopped runs.
"""

import functools

from mesh_transformer.cli.arguments import run_arguments, run_parser
from mesh_transformer.evaluation import all_steps, validation
from mesh_transformer.training import loop
from mesh_transformer.training.goodput import Ledger, process_seconds


def main() -> None:
    ledger = Ledger(process_seconds())
    args = run_parser(__doc__).parse_args()
    config, folder, options = run_arguments(args)

    from mesh_transformer.checkpoint.source import saved_steps
    from mesh_transformer.mesh.program import use_compilation_cache
    from mesh_transformer.transformer_shard import CausalTransformer

    use_compilation_cache()
    network = CausalTransformer(config, init=False)
    if args.mode == "eval":
        validation.validate(network, args.tune_model_path or folder)
    elif args.mode == "eval_all":
        all_steps.evaluate_all(network, folder, functools.partial(saved_steps, folder))
    else:
        loop.train(network, folder, ledger=ledger, **options)
