"""Compare the train step with that of a virtual mesh, in alternating steps."""

import argparse

import ablation

from mesh_transformer.config import Config
from mesh_transformer.mesh.devices import make_mesh, use_virtual_devices
from mesh_transformer.training.step import StateLayout
from mesh_transformer.util import run_script


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="tiny", help="config to train (default %(default)s)")
    parser.add_argument("--dp", type=int, default=2, help="replicas (default %(default)s)")
    parser.add_argument("--mp", type=int, default=4, help="devices per replica (default 4)")
    parser.add_argument("--virtual-dp", type=int, help="dp of the virtual mesh (default: --dp)")
    parser.add_argument("--virtual-mp", type=int, help="mp of the virtual mesh (default: --mp)")
    parser.add_argument("--rounds", type=int, default=6, help="timed steps of each (default 6)")
    parser.add_argument("--set", type=Config.setting, action="append", default=[], dest="changes")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    use_virtual_devices(args.dp * args.mp)
    sizes = {"cores_per_replica": args.mp, "tpu_size": args.dp * args.mp}
    config = Config.load(args.config, changes=dict(args.changes) | sizes)
    virtual_mesh = [args.virtual_dp or args.dp, args.virtual_mp or args.mp]
    batch = config.per_replica_batch  # of a virtual replica
    config = config.replace(per_replica_batch=batch * virtual_mesh[0] // args.dp)
    changes = {"virtual_mesh": virtual_mesh, "per_replica_batch": batch}
    pair = [ablation.Variant("as it is"), ablation.Variant("virtual", changes)]
    result = ablation.measure(StateLayout(config, make_mesh(config)), args.rounds, pair)
    for variant in result["variants"]:
        print(", ".join(f"{name}: {value}" for name, value in variant.items()))
    return 0


if __name__ == "__main__":
    run_script(main)
