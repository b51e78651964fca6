"""Load a Pythia checkpoint onto a mesh of 2 x 4 devices, compare it with one device, and export it.

Run `python examples/pythia_mesh.py FOLDER`, where FOLDER is a Hugging Face folder of any supported
family (such as that of `hf download EleutherAI/pythia-70m --local-dir pythia`).  It writes
FOLDER-back, which has the tensors of FOLDER, and pythia_mesh.png.  CPUs are divided into virtual
devices.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from safetensors.numpy import load_file

import mesh_transformer
from mesh_transformer.checkpoint import conversion
from mesh_transformer.storage.access import check_absent

DEVICES = {"tpu_size": 8, "cores_per_replica": 4, "dtype": "float32", "attention": "xla"}


def tensors(folder: str) -> dict[str, np.ndarray]:
    """Return all tensors in the safetensors files of a folder."""
    files = map(load_file, sorted(Path(folder).glob("*.safetensors")))
    return {name: tensor for file in files for name, tensor in file.items()}


def losses(network: mesh_transformer.CausalTransformer, tokens: np.ndarray) -> np.ndarray:
    """Return the loss of each sequence of tokens [B, T + 1]."""
    return np.asarray(network.eval({"obs": tokens[:, :-1], "target": tokens[:, 1:]})["loss"])


def main(folder: str) -> float:
    for target in (f"{folder}-mesh", f"{folder}-back"):
        check_absent(target)
    mesh = mesh_transformer.load(folder, changes=DEVICES)
    one = mesh_transformer.load(folder, changes=DEVICES | {"tpu_size": 1, "cores_per_replica": 1})
    rng = np.random.default_rng(0)
    tokens = rng.integers(mesh.config.n_vocab, size=(4, min(mesh.config.seq, 128) + 1))
    difference = float(np.abs(losses(mesh, tokens) - losses(one, tokens)).max())
    print(f"on {dict(mesh.mesh.shape)} and on one device, losses differ by {difference:.1e}")

    mesh.save(f"{folder}-mesh")
    mesh.wait()  # saving is asynchronous
    before = tensors(folder)
    dtype = next(iter(before.values())).dtype  # on the mesh, the parameters are float32
    conversion.convert(f"{folder}-mesh", "native", f"{folder}-back", "hf", dtype=dtype)
    after = tensors(f"{folder}-back")
    equal = [name for name in after if after[name].tobytes() == before[name].tobytes()]
    print(f"{len(equal)} of {len(after)} exported tensors have the bits of the imported ones")

    _, axes = plt.subplots(1, 3, figsize=(9, 3))
    assert mesh.state is not None
    layers = mesh.state["params"]["layers"]
    for axis, name in zip(axes, ("q", "v", "fc"), strict=True):
        matrix = layers[f"layer/{name}"]["w"]
        owners = np.zeros(matrix.shape[1:])  # of the first layer; all layers are stacked
        for device, index in matrix.sharding.devices_indices_map(matrix.shape).items():
            owners[index[1:]] = device.id % 4
        axis.imshow(owners, cmap="Set2", aspect="auto")
        axis.set_title(f"{name}: parts on the mp axis")
    plt.tight_layout()
    plt.savefig("pythia_mesh.png")
    return difference


if __name__ == "__main__":
    main(sys.argv[1])
