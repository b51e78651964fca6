"""Replacements for the public names of the original mesh-transformer-jax.

If the object that replaces an old name can be called in the same way, importing the old name
returns that object.  Otherwise the import raises an error that says what to use instead.

`NOW` lists all old names.  A test compares `NOW` with the tables of docs/porting.md, so a change
must be made in both.
"""

import functools
import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Old names and their replacements, sorted.  A value without spaces is the dotted name of a new
# object that can be called like the old one; importing the old name returns that object.  Any other
# value tells the user what to write instead.
NOW = {
    "create_finetune_tfrecords": (
        "run scripts/create_finetune_tfrecords.py, or call mesh_transformer.cli.text_records.main"
    ),
    "mesh_transformer.TPU_cluster.TPUCluster": (
        "use mesh_transformer.pod.launch.build_model(config, hosts), which returns a "
        "mesh_transformer.pod.cluster.TPUCluster"
    ),
    "mesh_transformer.build_model.build_model": "mesh_transformer.pod.launch.build_model",
    "mesh_transformer.checkpoint.fix_dtype": (
        "leave it out, as mesh_transformer.checkpoint.original.read returns bfloat16 as bfloat16"
    ),
    "mesh_transformer.checkpoint.index_weights": (
        "use mesh_transformer.checkpoint.original.write(folder, state, config), which writes all "
        "shards"
    ),
    "mesh_transformer.checkpoint.load_ckpt_v2": (
        "use mesh_transformer.transformer_shard.CausalTransformer.restore(folder)"
    ),
    "mesh_transformer.checkpoint.parallel_read": (
        "use mesh_transformer.transformer_shard.CausalTransformer.restore(folder)"
    ),
    "mesh_transformer.checkpoint.parallel_write": (
        "use mesh_transformer.transformer_shard.CausalTransformer.save(folder)"
    ),
    "mesh_transformer.checkpoint.pieces": "mesh_transformer.checkpoint.original_files.PIECES",
    "mesh_transformer.checkpoint.read_ckpt": (
        "use network = mesh_transformer.load(path, config), which takes any number of shards"
    ),
    "mesh_transformer.checkpoint.read_ckpt_lowmem": (
        "use network = mesh_transformer.load(path, config), which takes any number of shards"
    ),
    "mesh_transformer.checkpoint.read_shard": (
        "use mesh_transformer.checkpoint.original.read(folder, config), which merges all shards"
    ),
    "mesh_transformer.checkpoint.read_sharded_v2": (
        "use mesh_transformer.transformer_shard.CausalTransformer.restore(folder)"
    ),
    "mesh_transformer.checkpoint.reshard": (
        "use mesh_transformer.checkpoint.original.read(folder, config), which merges all shards"
    ),
    "mesh_transformer.checkpoint.split": (
        "use mesh_transformer.checkpoint.original.write(folder, state, config), which writes all "
        "shards"
    ),
    "mesh_transformer.checkpoint.tree_flatten_with_names": (
        "use jax.tree_util.tree_flatten_with_path(tree)"
    ),
    "mesh_transformer.checkpoint.tree_leaves_with_names": (
        "use jax.tree_util.tree_leaves_with_path(tree)"
    ),
    "mesh_transformer.checkpoint.write": (
        "use mesh_transformer.checkpoint.original.write(folder, state, config), which writes all "
        "shards"
    ),
    "mesh_transformer.checkpoint.write_ckpt": (
        "use mesh_transformer.transformer_shard.CausalTransformer.save(folder), or "
        "mesh_transformer.checkpoint.original.write(folder, state, config) for the old format"
    ),
    "mesh_transformer.checkpoint.write_ckpt_v2": (
        "use mesh_transformer.transformer_shard.CausalTransformer.save(folder)"
    ),
    "mesh_transformer.layers.EmbeddingShard": (
        "use mesh_transformer.model.ends.Embedding(config, par)"
    ),
    "mesh_transformer.layers.EmbeddingShardV2": (
        "use mesh_transformer.model.ends.Embedding(config, par)"
    ),
    "mesh_transformer.layers.Projection": (
        "use mesh_transformer.model.ends.Projection(config, par), with the loss of "
        "mesh_transformer.model.loss.losses"
    ),
    "mesh_transformer.layers.ProjectionShard": (
        "use mesh_transformer.model.ends.Projection(config, par), with the loss of "
        "mesh_transformer.model.loss.losses"
    ),
    "mesh_transformer.layers.RMSNorm": (
        "use mesh_transformer.model.norms.Norm(config, par) with the key norm, such as rmsnorm"
    ),
    "mesh_transformer.layers.RelativePositionEmbs": (
        "use mesh_transformer.model.ends.RelativePosition(config, par)"
    ),
    "mesh_transformer.layers.ReplicatedLayerNorm": (
        "use mesh_transformer.model.norms.Norm(config, par) with the key norm, such as layernorm"
    ),
    "mesh_transformer.layers.TransformerLayerShard": (
        "use mesh_transformer.model.layers.TransformerLayer(config, par)"
    ),
    "mesh_transformer.layers.TransformerLayerShardV2": (
        "use mesh_transformer.model.layers.TransformerLayer(config, par) with version 2"
    ),
    "mesh_transformer.layers.apply_rotary_pos_emb": (
        "use mesh_transformer.model.attention.rotate(x, positions, dims)"
    ),
    "mesh_transformer.layers.apply_rotary_pos_emb_v2": (
        "use mesh_transformer.model.attention.rotate(x, positions, dims)"
    ),
    "mesh_transformer.layers.fixed_pos_embedding": (
        "use mesh_transformer.model.attention.rotate(x, positions, dims)"
    ),
    "mesh_transformer.layers.getnorm": (
        "use mesh_transformer.model.norms.Norm(config, par), which reads the key norm"
    ),
    "mesh_transformer.layers.rotate_every_two": (
        "use mesh_transformer.model.attention.rotate(x, positions, dims)"
    ),
    "mesh_transformer.layers.rotate_every_two_v2": (
        "use mesh_transformer.model.attention.rotate(x, positions, dims)"
    ),
    "mesh_transformer.sampling.nucleaus_filter": (
        "use mesh_transformer.generation.sampling.nucleus_filter(logits, top_p, top_k), in which "
        "top_k 0 replaces None"
    ),
    "mesh_transformer.sampling.nucleaus_sample": (
        "use mesh_transformer.generation.sampling.nucleus_sample(key, logits, top_p=0.9, top_k=0, "
        "temp=1), which returns only the tokens; generate needs no sampler in params"
    ),
    "mesh_transformer.sampling.softmax_sample": (
        "use mesh_transformer.generation.sampling.softmax_sample(key, logits, temp), which returns "
        "only the tokens"
    ),
    "mesh_transformer.train_actor.NetworkRunner": (
        "use mesh_transformer.pod.launch.build_model(config, hosts), which starts a "
        "mesh_transformer.pod.runner.NetworkRunner on each host"
    ),
    "mesh_transformer.transformer_shard.CausalTransformer": (
        "mesh_transformer.transformer_shard.CausalTransformer"
    ),
    "mesh_transformer.transformer_shard.CausalTransformer.eval_xmap": (
        "use mesh_transformer.transformer_shard.CausalTransformer.eval(sample)"
    ),
    "mesh_transformer.transformer_shard.CausalTransformer.gen_length": (
        "give it to mesh_transformer.transformer_shard.CausalTransformer.generate(ctx, ctx_length, "
        "gen_length)"
    ),
    "mesh_transformer.transformer_shard.CausalTransformer.generate_xmap": (
        "use mesh_transformer.transformer_shard.CausalTransformer.generate(ctx, ctx_length, "
        "gen_length, sampler_options)"
    ),
    "mesh_transformer.transformer_shard.CausalTransformer.init_xmap": (
        "use mesh_transformer.transformer_shard.CausalTransformer.init()"
    ),
    "mesh_transformer.transformer_shard.CausalTransformer.load_ckpt": (
        "use mesh_transformer.transformer_shard.CausalTransformer.load(path), or restore(folder) "
        "to continue a run"
    ),
    "mesh_transformer.transformer_shard.CausalTransformer.move_xmap": (
        "leave it out, as mesh_transformer.load moves the weights to the devices; the key "
        "early_cast stores them in bfloat16"
    ),
    "mesh_transformer.transformer_shard.CausalTransformer.return_logits": (
        "use mesh_transformer.transformer_shard.CausalTransformer.logits(tokens), or score"
    ),
    "mesh_transformer.transformer_shard.CausalTransformer.train_xmap": (
        "use mesh_transformer.transformer_shard.CausalTransformer.train(sample)"
    ),
    "mesh_transformer.transformer_shard.CausalTransformer.write_ckpt": (
        "use mesh_transformer.transformer_shard.CausalTransformer.save(folder), then wait()"
    ),
    "mesh_transformer.transformer_shard.CausalTransformerShard": (
        "use mesh_transformer.model.transformer.logits(params, tokens, config, par), or eval and "
        "generate of mesh_transformer.transformer_shard.CausalTransformer"
    ),
    "mesh_transformer.transformer_shard.CausalTransformerV2": (
        "use mesh_transformer.transformer_shard.CausalTransformer with version 2 in its config"
    ),
    "mesh_transformer.util.ClipByGlobalNormState": (
        "use optax.EmptyState(), the state of optax.clip_by_global_norm"
    ),
    "mesh_transformer.util.additive_weight_decay": (
        "set the key weight_decay, or use optax.add_decayed_weights(weight_decay, mask) in an "
        "optimizer of your own"
    ),
    "mesh_transformer.util.clip_by_global_norm": (
        "set the key clip_norm, or use optax.clip_by_global_norm(max_norm) in an optimizer of your "
        "own"
    ),
    "mesh_transformer.util.f_pmean": (
        "use mesh_transformer.mesh.parallel.Parallel.fan_out, which sums gradients over mp, or "
        "jax.lax.pmean"
    ),
    "mesh_transformer.util.f_pmean_bwd": (
        "use mesh_transformer.mesh.parallel.Parallel.fan_out, which sums gradients over mp, or "
        "jax.lax.pmean"
    ),
    "mesh_transformer.util.f_pmean_fwd": (
        "use mesh_transformer.mesh.parallel.Parallel.fan_out, which sums gradients over mp, or "
        "jax.lax.pmean"
    ),
    "mesh_transformer.util.f_psum": "use mesh_transformer.mesh.parallel.Parallel.fan_out(x)",
    "mesh_transformer.util.f_psum_bwd": "use mesh_transformer.mesh.parallel.Parallel.fan_out(x)",
    "mesh_transformer.util.f_psum_fwd": "use mesh_transformer.mesh.parallel.Parallel.fan_out(x)",
    "mesh_transformer.util.g_psum": "use mesh_transformer.mesh.parallel.Parallel.sum(x)",
    "mesh_transformer.util.g_psum_bwd": "use mesh_transformer.mesh.parallel.Parallel.sum(x)",
    "mesh_transformer.util.g_psum_fwd": "use mesh_transformer.mesh.parallel.Parallel.sum(x)",
    "mesh_transformer.util.global_norm": (
        "use optax.global_norm(updates), or the grad_norm that "
        "mesh_transformer.transformer_shard.CausalTransformer.train returns"
    ),
    "mesh_transformer.util.gpt3_schedule": "mesh_transformer.training.schedule.gpt3_schedule",
    "mesh_transformer.util.head_print": "use print where jax.process_index() is 0",
    "mesh_transformer.util.maybe_shard": (
        "use mesh_transformer.mesh.parallel.Parallel.shard(x, *axes), or "
        "jax.lax.with_sharding_constraint"
    ),
    "mesh_transformer.util.shard_axis": (
        "use jax.shard_map with jax.sharding.PartitionSpec, which splits the arrays"
    ),
    "mesh_transformer.util.to_bf16": "mesh_transformer.model.casts.to_bf16",
    "mesh_transformer.util.to_f16": (
        "run scripts/convert_checkpoint.py with --dtype f16, or use jax.tree.map"
    ),
    "mesh_transformer.util.to_f32": "mesh_transformer.model.casts.to_f32",
    "mesh_transformer.util.unshard_axis": (
        "use mesh_transformer.mesh.parallel.Parallel.gather(x, axis=0)"
    ),
    'params["d_head"]': "use the key head_size",
    'params["eval_only"]': (
        "leave it out, as mesh_transformer.load reads no optimizer unless optimizer=True"
    ),
    'params["gen_length"]': (
        "give it to mesh_transformer.transformer_shard.CausalTransformer.generate(ctx, ctx_length, "
        "gen_length)"
    ),
    'params["optimizer"]': (
        "leave it out, or give an optimizer's name, such as adam, as the keys lr, end_lr, "
        "schedule, warmup_steps, anneal_steps, weight_decay, adam_b1, adam_b2, adam_eps and "
        "clip_norm set it"
    ),
    'params["sampler"]': (
        "leave it out, as mesh_transformer.transformer_shard.CausalTransformer.generate takes "
        "top_p, top_k and temp in sampler_options"
    ),
    "ray_tpu.check_tpu": "use mesh_transformer.pod.tpu.vm.TpuVm.state()",
    "ray_tpu.create_tpu": (
        "use mesh_transformer.pod.tpu.vm.TpuVm(spec) in a with statement, with a "
        "mesh_transformer.pod.tpu.spec.TpuSpec"
    ),
    "ray_tpu.delete_tpu": (
        "use mesh_transformer.pod.tpu.vm.TpuVm.delete(), or leave its with statement"
    ),
    "ray_tpu.get_bearer": (
        "use mesh_transformer.pod.tpu.api.new_client(), which has Google's default credentials"
    ),
    "ray_tpu.get_connection": "use mesh_transformer.pod.tpu.vm.TpuVm.ssh()",
    "ray_tpu.get_project": "mesh_transformer.pod.tpu.api.default_project",
    "ray_tpu.start_ray": "use mesh_transformer.pod.tpu.vm.TpuVm.start_ray(address, token)",
    "ray_tpu.wait_til": (
        "use mesh_transformer.pod.tpu.vm.TpuVm(spec) in a with statement, which waits until the "
        "TPU is ready"
    ),
    "slim_model": (
        "run scripts/convert_checkpoint.py --from original SRC --to original DST --config C --slim "
        "--dtype bf16"
    ),
    "tasks": (
        "run eval_harness.py, or use mesh_transformer.evaluation.harness.Harness(config, names)"
    ),
    "tfrecord_loader.TFRecordLoader": (
        "use mesh_transformer.data.loader.TFRecordNewInputs, or read other features with "
        "mesh_transformer.data.tfrecords.frames and mesh_transformer.data.tfrecords.features"
    ),
    "tfrecord_loader.TFRecordNewInputs": (
        "use mesh_transformer.data.loader.TFRecordNewInputs, whose get_samples() returns obs and "
        "target and whose state() replaces get_state()"
    ),
    "tfrecord_loader.TFRecordWIT": (
        "write the token sequences with mesh_transformer.data.tfrecords.write_set, and use "
        "mesh_transformer.data.loader.TFRecordNewInputs"
    ),
    "to_hf_weights": (
        "run scripts/convert_checkpoint.py --from original SRC --to hf DST --config C --dtype f16"
    ),
}
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
