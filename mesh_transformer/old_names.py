"""Replacements for the public names of the original mesh-transformer-jax.

If the object that replaces an old name can be called in the same way, importing the old name
returns that object.  Otherwise the import raises an error that says what to use instead.

A test compares `NOW` with the tables of docs/porting.md, so a change must be made in both.
"""

import functools
import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ORIGINAL = "mesh_transformer.checkpoint.original"
_MODEL = "mesh_transformer.model"
_NETWORK = "mesh_transformer.transformer_shard.CausalTransformer"
_PARALLEL = "mesh_transformer.mesh.parallel.Parallel"
_SAMPLING = "mesh_transformer.generation.sampling"
_BUILD_MODEL = "mesh_transformer.pod.launch.build_model"
_VM = "mesh_transformer.pod.tpu.vm.TpuVm"
_DATA = "mesh_transformer.data"
_GENERATE = f"{_NETWORK}.generate(ctx, ctx_length, gen_length"
_CONVERT = "run scripts/convert_checkpoint.py"

# {prefix: {old names without the prefix, separated by spaces: what replaces each of them}}.  A
# replacement without spaces is the dotted name of a new object that can be called like the old one;
# importing the old name returns that object.  Any other one tells the user what to write instead.
_REPLACEMENTS = {
    "mesh_transformer.": {
        "TPU_cluster.TPUCluster": (
            f"use {_BUILD_MODEL}(config, hosts), which returns a "
            "mesh_transformer.pod.cluster.TPUCluster"
        ),
        "build_model.build_model": _BUILD_MODEL,
        "train_actor.NetworkRunner": (
            f"use {_BUILD_MODEL}(config, hosts), which starts a "
            "mesh_transformer.pod.runner.NetworkRunner on each host"
        ),
    },
    "mesh_transformer.checkpoint.": {
        "fix_dtype": f"leave it out, as {_ORIGINAL}.read returns bfloat16 as bfloat16",
        "index_weights split write": (
            f"use {_ORIGINAL}.write(folder, state, config), which writes all shards"
        ),
        "load_ckpt_v2 parallel_read read_sharded_v2": f"use {_NETWORK}.restore(folder)",
        "parallel_write write_ckpt_v2": f"use {_NETWORK}.save(folder)",
        "pieces": "mesh_transformer.checkpoint.original_files.PIECES",
        "read_ckpt read_ckpt_lowmem": (
            "use network = mesh_transformer.load(path, config), which takes any number of shards"
        ),
        "read_shard reshard": f"use {_ORIGINAL}.read(folder, config), which merges all shards",
        "tree_flatten_with_names": "use jax.tree_util.tree_flatten_with_path(tree)",
        "tree_leaves_with_names": "use jax.tree_util.tree_leaves_with_path(tree)",
        "write_ckpt": (
            f"use {_NETWORK}.save(folder), or {_ORIGINAL}.write(folder, state, config) for the old "
            "format"
        ),
    },
    "mesh_transformer.layers.": {
        "EmbeddingShard EmbeddingShardV2": f"use {_MODEL}.ends.Embedding(config, par)",
        "Projection ProjectionShard": (
            f"use {_MODEL}.ends.Projection(config, par), with the loss of {_MODEL}.loss.losses"
        ),
        "RMSNorm": f"use {_MODEL}.norms.Norm(config, par) with the key norm, such as rmsnorm",
        "RelativePositionEmbs": f"use {_MODEL}.ends.RelativePosition(config, par)",
        "ReplicatedLayerNorm": (
            f"use {_MODEL}.norms.Norm(config, par) with the key norm, such as layernorm"
        ),
        "TransformerLayerShard": f"use {_MODEL}.layers.TransformerLayer(config, par)",
        "TransformerLayerShardV2": (
            f"use {_MODEL}.layers.TransformerLayer(config, par) with version 2"
        ),
        "apply_rotary_pos_emb apply_rotary_pos_emb_v2 fixed_pos_embedding rotate_every_two "
        "rotate_every_two_v2": f"use {_MODEL}.attention.rotate(x, positions, dims)",
        "getnorm": f"use {_MODEL}.norms.Norm(config, par), which reads the key norm",
    },
    "mesh_transformer.sampling.": {
        "nucleaus_filter": (
            f"use {_SAMPLING}.nucleus_filter(logits, top_p, top_k), in which top_k 0 replaces None"
        ),
        "nucleaus_sample": (
            f"use {_SAMPLING}.nucleus_sample(key, logits, top_p=0.9, top_k=0, temp=1), which "
            "returns only the tokens; generate needs no sampler in params"
        ),
        "softmax_sample": (
            f"use {_SAMPLING}.softmax_sample(key, logits, temp), which returns only the tokens"
        ),
    },
    "mesh_transformer.transformer_shard.": {
        "CausalTransformer": _NETWORK,
        "CausalTransformerShard": (
            f"use {_MODEL}.transformer.logits(params, tokens, config, par), or eval and generate "
            f"of {_NETWORK}"
        ),
        "CausalTransformerV2": f"use {_NETWORK} with version 2 in its config",
    },
    f"{_NETWORK}.": {
        "eval_xmap": f"use {_NETWORK}.eval(sample)",
        "gen_length": f"give it to {_GENERATE})",
        "generate_xmap": f"use {_GENERATE}, sampler_options)",
        "init_xmap": f"use {_NETWORK}.init()",
        "load_ckpt": f"use {_NETWORK}.load(path), or restore(folder) to continue a run",
        "move_xmap": (
            "leave it out, as mesh_transformer.load moves the weights to the devices; the key "
            "early_cast stores them in bfloat16"
        ),
        "return_logits": f"use {_NETWORK}.logits(tokens), or score",
        "train_xmap": f"use {_NETWORK}.train(sample)",
        "write_ckpt": f"use {_NETWORK}.save(folder), then wait()",
    },
    "mesh_transformer.util.": {
        "ClipByGlobalNormState": "use optax.EmptyState(), the state of optax.clip_by_global_norm",
        "additive_weight_decay": (
            "set the key weight_decay, or use optax.add_decayed_weights(weight_decay, mask) in an "
            "optimizer of your own"
        ),
        "clip_by_global_norm": (
            "set the key clip_norm, or use optax.clip_by_global_norm(max_norm) in an optimizer of "
            "your own"
        ),
        "f_pmean f_pmean_bwd f_pmean_fwd": (
            f"use {_PARALLEL}.fan_out, which sums gradients over mp, or jax.lax.pmean"
        ),
        "f_psum f_psum_bwd f_psum_fwd": f"use {_PARALLEL}.fan_out(x)",
        "g_psum g_psum_bwd g_psum_fwd": f"use {_PARALLEL}.sum(x)",
        "global_norm": (
            f"use optax.global_norm(updates), or the grad_norm that {_NETWORK}.train returns"
        ),
        "gpt3_schedule": "mesh_transformer.training.schedule.gpt3_schedule",
        "head_print": "use print where jax.process_index() is 0",
        "maybe_shard": f"use {_PARALLEL}.shard(x, *axes), or jax.lax.with_sharding_constraint",
        "shard_axis": "use jax.shard_map with jax.sharding.PartitionSpec, which splits the arrays",
        "to_bf16": f"{_MODEL}.casts.to_bf16",
        "to_f16": f"{_CONVERT} with --dtype f16, or use jax.tree.map",
        "to_f32": f"{_MODEL}.casts.to_f32",
        "unshard_axis": f"use {_PARALLEL}.gather(x, axis=0)",
    },
    "ray_tpu.": {
        "check_tpu": f"use {_VM}.state()",
        "create_tpu": (
            f"use {_VM}(spec) in a with statement, with a mesh_transformer.pod.tpu.spec.TpuSpec"
        ),
        "delete_tpu": f"use {_VM}.delete(), or leave its with statement",
        "get_bearer": (
            "use mesh_transformer.pod.tpu.api.new_client(), which has Google's default credentials"
        ),
        "get_connection": f"use {_VM}.ssh()",
        "get_project": "mesh_transformer.pod.tpu.api.default_project",
        "start_ray": f"use {_VM}.start_ray(address, token)",
        "wait_til": f"use {_VM}(spec) in a with statement, which waits until the TPU is ready",
    },
    "tfrecord_loader.": {
        "TFRecordLoader": (
            f"use {_DATA}.loader.TFRecordNewInputs, or read other features with "
            f"{_DATA}.tfrecords.frames and {_DATA}.tfrecords.features"
        ),
        "TFRecordNewInputs": (
            f"use {_DATA}.loader.TFRecordNewInputs, whose get_samples() returns obs and target and "
            "whose state() replaces get_state()"
        ),
        "TFRecordWIT": (
            f"write the token sequences with {_DATA}.tfrecords.write_set, and use "
            f"{_DATA}.loader.TFRecordNewInputs"
        ),
    },
    "": {
        "create_finetune_tfrecords": (
            "run scripts/create_finetune_tfrecords.py, or call "
            "mesh_transformer.cli.text_records.main"
        ),
        'params["d_head"]': "use the key head_size",
        'params["eval_only"]': (
            "leave it out, as mesh_transformer.load reads no optimizer unless optimizer=True"
        ),
        'params["gen_length"]': f"give it to {_GENERATE})",
        'params["optimizer"]': (
            "leave it out, or give an optimizer's name, such as adam, as the keys lr, end_lr, "
            "schedule, warmup_steps, anneal_steps, weight_decay, adam_b1, adam_b2, adam_eps and "
            "clip_norm set it"
        ),
        'params["sampler"]': (
            f"leave it out, as {_NETWORK}.generate takes top_p, top_k and temp in sampler_options"
        ),
        "slim_model": (
            f"{_CONVERT} --from original SRC --to original DST --config C --slim --dtype bf16"
        ),
        "tasks": (
            "run eval_harness.py, or use mesh_transformer.evaluation.harness.Harness(config, names)"
        ),
        "to_hf_weights": f"{_CONVERT} --from original SRC --to hf DST --config C --dtype f16",
    },
}
# {old name: what replaces it}, sorted
NOW = dict(
    sorted(
        (f"{begin}{name}", now)
        for begin, own in _REPLACEMENTS.items()
        for names, now in own.items()
        for name in names.split()
    )
)
_MODULES = {name.rpartition(".")[0] for name in NOW}


def error_line(name: str) -> str | None:
    """Return the error message for an old name that no longer works, such as "slim_model: run ...".

    Returns None if `name` still works, or if it is not an old name.
    """
    now = NOW.get(name, "")
    return f"{name}: {now}" if " " in now else None


def keys_line(params: dict[str, Any]) -> str | None:
    """Return one error message for all config keys in `params` that no longer exist.

    The message says what replaces each key.  Returns None if `params` has no removed key of
    mesh-transformer-jax.
    """
    # The key "optimizer" still exists, but its value is a name.
    now = {"optimizer"} if isinstance(params.get("optimizer"), str) else set()
    lines = [error_line(f'params["{key}"]') for key in params if key not in now]
    return "; ".join(filter(None, lines)) or None


def find(module: str, name: str) -> Any:
    """Return the object that replaces an old name.

    Modules with old names call this function from their `__getattr__`.

    Args:
      module: the module that defined the old name in mesh-transformer-jax.
      name: the old name, without the module.

    Raises:
      ImportError: if the old name no longer works; the message says what to use instead.  This is
        not an AttributeError, because `from module import name` would discard its message.
      AttributeError: if mesh-transformer-jax had no such name either.
    """
    if line := error_line(f"{module}.{name}"):
        raise ImportError(line)
    if (now := NOW.get(f"{module}.{name}")) is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    home, _, attribute = now.rpartition(".")
    return getattr(importlib.import_module(home), attribute)


class OldModules:
    """Import finder and loader for modules of mesh-transformer-jax that no longer exist.

    Importing such a module succeeds with an empty module.  Each of its names is looked up in `NOW`
    when the name is used.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for the old module `name`, or None if `name` is not an old module.

        Python calls this method only if no real module has that name.

        Raises:
          ModuleNotFoundError: if the module itself is a key of `NOW`, such as `slim_model`; the
            message says what to use instead.
        """
        if "." not in name and (line := error_line(name)):
            raise ModuleNotFoundError(line, name=name)
        loader: Any = self  # an importlib.abc.Loader in all but name; importing that class is slow
        return ModuleSpec(name, loader) if name in _MODULES else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, which makes Python create an ordinary module object."""

    def exec_module(self, module: ModuleType) -> None:
        """Set the module's `__getattr__`, which looks up old names when they are used."""
        _set_getattr(module)


_FINDER = OldModules()


def _set_getattr(module: ModuleType) -> None:
    vars(module)["__getattr__"] = functools.partial(find, module.__name__)


def install() -> None:
    """Make the old names of removed modules and of `mesh_transformer.checkpoint` importable.

    `mesh_transformer.checkpoint` used to be a module and is now a package.  By a rule of this
    library, a package's `__init__` contains no code, so this function sets the package's
    `__getattr__`.  The modules `util` and `transformer_shard` define a `__getattr__` themselves.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)  # last, so that modules that exist are found first
    _set_getattr(importlib.import_module("mesh_transformer.checkpoint"))
