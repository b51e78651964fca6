"""Load a checkpoint of any number of shards onto any number of devices, and sample from it.

The defaults follow the original's example of the same name: GPT-J-6B's 8 shards on one device.
"""

import argparse
import time

from mesh_transformer.util import InputError, run_script

PROMPT = (
    "In a shocking finding, scientists discovered a herd of unicorns living in a remote valley "
    "of the Andes. Even more surprising was that the unicorns"
)


def parse_args() -> argparse.Namespace:
    from mesh_transformer.cli.arguments import Parser, add_config_arguments

    parser = Parser(description=__doc__)
    add_config_arguments(parser, " (default %(default)s)", "configs/6B_roto_256.json")
    parser.add_argument(
        "--model-path",
        default="step_383500",
        help="model folder or step_N, in any format (default %(default)s)",
    )
    parser.add_argument(
        "--devices", type=int, default=1, help="number of devices to load onto (default 1)"
    )
    parser.add_argument(
        "--prompt", default=PROMPT, help="text to continue (default: the original's, on unicorns)"
    )
    parser.add_argument("--length", type=int, default=128, help="tokens to generate (default 128)")
    parser.add_argument("--samples", type=int, default=1, help="answers to generate (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first answer (default 0)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    for flag in ("devices", "length", "samples"):
        if getattr(args, flag) < 1:
            raise InputError(f"--{flag} is {getattr(args, flag)}, expected at least 1")

    import numpy as np

    from mesh_transformer.cli.arguments import load_config

    config = load_config(args)
    # bf16 parameters, as in the original's example: one device may not have room for f32.
    early_cast = config.dtype == "bfloat16"
    devices = args.devices
    config = config.replace(cores_per_replica=devices, tpu_size=devices, early_cast=early_cast)

    from mesh_transformer.data.special_tokens import before_end, end_tokens, prompt_tokens
    from mesh_transformer.data.tokenizer import Tokenizer
    from mesh_transformer.transformer_shard import load

    tokenizer = Tokenizer.of(None, config, must_fit=True).loaded
    began = time.perf_counter()
    network = load(args.model_path, config)
    count, seconds = network.mesh.size, time.perf_counter() - began
    print(f"loaded onto {count} device{'s' if count > 1 else ''} in {seconds:.1f} s")

    prompt = prompt_tokens(tokenizer, args.prompt)
    tokens = np.tile(np.array(prompt), (args.samples, 1))
    options = {"top_p": 0.9, "temp": 0.75, "seed": args.seed + np.arange(args.samples)}
    began = time.perf_counter()
    answers = network.generate(tokens, np.full(args.samples, len(prompt)), args.length, options)
    print(f"{answers.size} tokens in {time.perf_counter() - began:.1f} s, compilation included")
    ends = end_tokens(tokenizer, network.config)
    for answer in answers.tolist():
        text = before_end(answer, ends)
        print(f"\n{args.prompt}{tokenizer.decode(text, skip_special_tokens=True)}")


if __name__ == "__main__":
    run_script(main)
