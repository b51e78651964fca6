"""`CausalTransformer`, a GPT-J model sharded over a mesh of devices, and `load` to open one."""

import contextlib
import functools
import hashlib
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from mesh_transformer import old_names
from mesh_transformer.calls import Call
from mesh_transformer.checkpoint import adapters, loading, step_folders
from mesh_transformer.checkpoint.integrity import host_checksum, tree_checksums
from mesh_transformer.checkpoint.native import Checkpoints
from mesh_transformer.checkpoint.source import Source, check_vacant
from mesh_transformer.checkpoint.state_tree import check_same_run, differing_leaf, leaves
from mesh_transformer.config import Config
from mesh_transformer.data.batches import check_tokens, whole_batch
from mesh_transformer.data.loader import open_train_set
from mesh_transformer.generation.finite import blaming, check_finite, describe_bad_weights
from mesh_transformer.generation.generator import Generator
from mesh_transformer.generation.speculation import draft_config
from mesh_transformer.generation.weights import weight_layout
from mesh_transformer.mesh import accelerators
from mesh_transformer.mesh.declaration import map_declared
from mesh_transformer.mesh.device_order import first_devices
from mesh_transformer.mesh.devices import fit_to_devices, make_mesh, use_virtual_devices
from mesh_transformer.mesh.placement import Rows, limit_in_flight, process_rows
from mesh_transformer.mesh.program import check_not_traced
from mesh_transformer.network import (
    AddAdapters,
    AddDraft,
    Checksum,
    Claim,
    Eval,
    Init,
    Load,
    OnlyGenerate,
    Restore,
    Save,
    SetAside,
    Trace,
    Train,
    TrainableNetwork,
    TrainSet,
    Wait,
)
from mesh_transformer.storage.access import AnyPath
from mesh_transformer.training import objectives
from mesh_transformer.training import step as steps
from mesh_transformer.training.functions import Parameters, functions_layout
from mesh_transformer.training.profile import traced
from mesh_transformer.util import InputError, NonFiniteError, UncountedWarning


class CausalTransformer(TrainableNetwork):
    """A GPT-J (or related) model with its optimizer, sharded over a (dp, mp) mesh of JAX devices.

    What is on the devices, and when it is freed:

        attribute            contents                              freed by
        state                parameters, moments of the optimizer  `only_generate`; steps donate it
        _generator           weights as generation needs them      a step, `init`, `load`, `restore`
        _generator.adapters  LoRA adapters to choose from          `init`, `load`, `restore`
        _generator.draft     the draft model of `add_draft`        the end of the network
        _teacher             parameters of the config's `teacher`  `only_generate`
        a `Batch`            its KV cache and settings             the end of the batch

    Each program is compiled when it is first needed, once per network: those of `train`, `eval` and
    `logits` are attributes of this class; those of generation depend on sizes and are cached in
    `Generator`, and a server compiles them in advance (`Engine.warm_up`).  The commands also use
    JAX's compilation cache on disk (`mesh.program`).

    If the devices belong to several processes, all processes must make the same calls.  Each
    process passes in only the batch rows of its own `replicas`, and gets back the results of these
    rows as numpy arrays.  Scalar results are the same in all processes.

    On a machine without an accelerator, `config.tpu_size` virtual CPU devices are created, unless
    JAX's devices are already initialised.

    Args:
      config: a Config, a dict of config keys and values, the path of a JSON or YAML file, or the
        name of a shipped config or preset, such as "6B_v3-8" or "gpt2".
      devices: the JAX devices to use, in this order (default: all, in the order of their links).
      init: whether to initialise parameters and optimizer state.  Pass False if you call `load` or
        `restore` next.

    Attributes:
      config: the config, as a `Config`.
      mesh: the mesh of the devices (see `make_mesh`).
      dp: number of data-parallel replicas.
      batch_size: number of sequences per microbatch, summed over all replicas.
      noise_batches: see `TrainableNetwork`.
      peak_flops: see `TrainableNetwork`.
      step: number of completed updates.
      state: the parameters, the optimizer's state and so on, as device arrays (see
        `mesh_transformer.training.step.init_state`); None before `init`, `load` or `restore`.
    """

    def __init__(
        self,
        config: Config | dict[str, Any] | str | os.PathLike[str],
        *,
        devices: Sequence[Any] | None = None,
        init: bool = True,
    ):
        self.config = Config.of(config)
        assert self.config.tpu_size is not None
        use_virtual_devices(self.config.tpu_size)
        self.mesh = make_mesh(self.config, devices)
        self._layout = steps.StateLayout(self.config, self.mesh)
        weight_layout(self._layout)  # raises an error early if the model cannot generate
        self.dp = self.mesh.shape["dp"]
        self.batch_size = self.config.per_replica_batch * self.config.replicas(self.dp)
        accumulation = self.config.gradient_accumulation_steps
        small = self.batch_size // self._layout.par.replicas
        self.noise_batches = (small, self.batch_size * accumulation)
        hardware = accelerators.hardware_of(self.mesh.devices.flat[0])
        self.peak_flops = None if hardware is None else hardware.peak * self.mesh.size
        self._rows = Rows(self.mesh, self.config.virtual_replicas(self.dp))
        self._checkpoints: Checkpoints | None = None
        self._folder: str | None = None  # of `_checkpoints`
        self.step = 0  # a copy on the host; reading the step in `state` would wait for the device
        self._replaced = True  # whether `init` or `load` came after the last `save` or `restore`
        self._tracing = contextlib.ExitStack()  # of the trace in progress
        self._unchecked = False  # whether loaded weights may be NaN
        self.state: steps.State | None = None
        self._base: adapters.Base | None = None  # the base model that the adapters are trained on
        if init:
            self.init()

    if not TYPE_CHECKING:  # A type checker should know only the attributes that exist.

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, which names the replacement of an original attribute."""
            if line := old_names.error_line(f"{__name__}.CausalTransformer.{name}"):
                raise AttributeError(line)
            return object.__getattribute__(self, name)  # raises the usual error

    def run(self, call: Call[Any]) -> Any:
        """Run a call on the devices; its batch rows are those of this process."""
        return self._dispatch(call)

    @functools.singledispatchmethod
    def _dispatch(self, call: Call[Any]) -> Any:
        # After `only_generate` there is no state, and the generator uses its copy of the weights.
        return self._generator.run(None if self.state is None else self._params(), call)

    @_dispatch.register
    def _init(self, _: Init) -> None:
        if self.config.lora_rank:
            raise InputError(
                f"config: lora_rank is {self.config.lora_rank}, but adapters are trained on an "
                "existing model; load one first (--tune-model-path)"
            )
        self._drop_weights(adapters=True)
        self.state = steps.compile_init(self._layout)(jax.random.key(self.config.seed))
        self.step, self._replaced, self._unchecked = 0, True, False

    @property
    def params(self) -> Parameters:
        """The trained parameters, for functions such as `mesh_transformer.apply`.

        `train` updates them in place: get them again after it.
        """
        return Parameters(self._loaded()["params"], self._functions_layout)

    @property
    def frozen(self) -> Parameters:
        """The parameters that are not trained: with LoRA, those of the base model."""
        return Parameters(self._loaded()["frozen"], self._functions_layout)

    @functools.cached_property
    def _functions_layout(self) -> steps.StateLayout:
        return functions_layout(self._layout)

    def replace(self, *, params: Parameters) -> None:
        """Give the trained parameters other values; the optimizer's state and the step stay.

        Args:
          params: the new values, such as `network.params` plus an update, on any devices.

        Raises:
          InputError: if their names or shapes are not those of `network.params`.
        """
        state, expected = self._loaded(), self._layout.abstract["params"]
        if not isinstance(params, Parameters):
            raise InputError(f"params: {type(params).__name__}, expected those of network.params")
        if difference := differing_leaf(leaves(params.tree), leaves(expected)):
            raise InputError(f"params: {difference}; give an update of network.params")

        def placed(like: jax.ShapeDtypeStruct, x: Array) -> Array:
            # A copy, as training updates it in place.
            return jax.device_put(x.astype(like.dtype), like.sharding, may_alias=False)

        self._drop_weights()
        self.state = state | {"params": jax.tree.map(placed, expected, params.tree)}
        self._replaced = self._unchecked = True

    @property
    def replicas(self) -> list[int]:
        """Ascending dp indices of the replicas that have devices in this process."""
        return self._rows.replicas

    @property
    def adapters(self) -> int:
        """Number of LoRA adapters that each text may choose from; see `Network.add_adapters`."""
        return len(self._generator.adapters) if "_generator" in vars(self) else 0

    @property
    def alone(self) -> bool:
        """Whether no other process has to make the same calls."""
        return self._rows.alone

    @property
    def own_replicas(self) -> Sequence[int]:
        """Replicas whose batch rows this process passes in and gets back."""
        return self._rows.replicas

    def set_objective(self, objective: objectives.Objective | None) -> None:
        """Let `train` minimise a function; see `TrainableNetwork.set_objective`."""
        objectives.head_of(self.config, objective)  # checks it
        if objective is not None and self.config.teacher is not None:
            raise InputError("objective: the config has a teacher; set teacher to null")
        if objective != self.objective:
            self.objective = objective
            vars(self).pop("_train", None)

    @functools.cached_property
    def _train(self) -> Any:
        head = objectives.head_of(self.config, self.objective)
        return steps.compile_train(self._layout, head, self._teacher.layout)

    @functools.cached_property
    def _teacher(self) -> loading.LoadedTeacher:
        return loading.load_teacher(self._layout)

    @functools.cached_property
    def _eval(self) -> Any:
        return steps.compile_eval(self._layout)

    @functools.cached_property
    def _logits(self) -> Any:
        return steps.compile_logits(self._layout)

    @functools.cached_property
    def _generator(self) -> Generator:
        return Generator(self._layout, self._rows)

    def _drop_weights(self, *, adapters: bool = False) -> None:
        """Free the generator's copy of the weights, and optionally its adapters."""
        if "_generator" in vars(self):  # a run that only trains has none
            self._generator.drop_weights()
            if adapters:
                self._generator = self._generator.of_next_params()

    def open_train_set(self) -> TrainSet:
        """Open `config.train_set`; return an iterator over batches that `train` accepts."""
        own = process_rows([self.replicas], self.batch_size // self.dp)
        return open_train_set(self.config, self.batch_size, *own)

    @_dispatch.register
    def _update(self, call: Train) -> dict[str, Array]:
        batch = call.batch
        assert batch is not None
        if batch["obs"].shape[1] % self._rows.multiple:
            raise InputError(
                f"train: the batch has {batch['obs'].shape[1]} sequences, "
                f"expected a multiple of the {self._rows.multiple} replicas"
            )
        state = self._loaded()
        if self._unchecked and (bad := describe_bad_weights(self._params(), self.mesh)):
            raise NonFiniteError(f"train: {bad}; train from other weights")
        self._unchecked = False
        self._drop_weights()
        if "opt_state" not in state:
            state["opt_state"] = steps.compile_opt_state(self._layout)(state["params"])
        if self._rows.alone and not batch.get("loss_mask", np.ones(1)).any():
            line = "train: no target of the batch counts in the loss, so its update is skipped"
            warnings.warn(line, UncountedWarning, stacklevel=5)  # of `train`
        batch, *count = whole_batch(self.config, batch)
        placed = self._rows.place(batch, P(None, "dp"))
        self.state, metrics = self._train(state, placed, *count, *self._teacher.params)
        self.step += 1
        limit_in_flight(metrics["loss"])
        return metrics

    @_dispatch.register
    def _evaluate(self, call: Eval) -> dict[str, Any]:
        count, rows = len(call.batch["obs"]), self._rows
        placed = rows.place({key: rows.pad(x) for key, x in call.batch.items()}, P("dp"))
        params = self._params()
        if call.base:
            declared = self._layout.declared
            params = map_declared(lambda d, x: _zeros(x) if d.adapter else x, declared, params)
        outputs = self._eval(params, placed)
        limit_in_flight(outputs["loss"])
        return {name: rows.fetch(x, count) for name, x in outputs.items()}

    @_dispatch.register
    def _checksum(self, _: Checksum) -> str:
        state = self._loaded()
        own = leaves(self._layout.unpadded({key: state[key] for key in ("params", "frozen")}))
        sums = tree_checksums(own)
        last = [path for path in own if path[-1].endswith("_lora_b")]
        zeros = (host_checksum(np.zeros(own[path].shape, own[path].dtype)) for path in last)
        if all(sum(sums[path]) % 2**32 == zero for path, zero in zip(last, zeros, strict=True)):
            sums = {path: sums[path] for path in sums if "_lora_" not in path[-1]}
        return hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()

    def logits(self, tokens: np.ndarray) -> Array | np.ndarray:
        """Return the next-token logits f32 [B, T, n_vocab] at each position of `tokens` [B, T]."""
        tokens = check_tokens(self.config, "tokens", tokens, 2)
        rows = self._rows
        outputs = self._logits(self._params(), rows.place(rows.pad(tokens), P("dp")))
        logits, finite = (rows.fetch(x, len(tokens)) for x in jax.block_until_ready(outputs))
        with blaming(lambda: self._generator.cause(self._params())):
            check_finite((np.where(finite, 0, np.nan),), "logits")
        return logits

    @_dispatch.register
    def _add_adapters(self, call: AddAdapters) -> None:
        params, layout = self._params(), self._layout
        loaded = [loading.load_adapter(Source.of(path), layout, params) for path in call.paths]
        self._generator = Generator(layout, self._rows, loaded, self._generator.draft)

    @_dispatch.register
    def _add_draft(self, call: AddDraft) -> None:
        source = Source.of(call.path)
        config = draft_config(source.config, self.config, source.path)
        draft = CausalTransformer(config, devices=list(self.mesh.devices.flat), init=False)
        draft.load(source, only_params=True)
        draft.only_generate()
        self._generator = self._generator.with_draft(draft._generator)

    @_dispatch.register
    def _only_generate(self, _: OnlyGenerate) -> None:
        self._generator.cache_weights(self._params())
        self.state = None
        vars(self).pop("_teacher", None)

    @_dispatch.register
    def _claim(self, call: Claim) -> None:
        objectives.check_functions(self.config)  # before weights are made
        state = jax.tree.leaves(self.saved_template())
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in state)
        self._writer(call.folder).claim(size if call.room else 0)

    @_dispatch.register
    def _set_aside(self, call: SetAside) -> str:
        return step_folders.set_aside(call.step) if jax.process_index() == 0 else ""

    @property
    def save_failed(self) -> bool:
        """Whether the last save has failed in the background; `wait` raises the error."""
        return self._checkpoints is not None and self._checkpoints.save_failed

    @_dispatch.register
    def _save(self, call: Save) -> None:
        writer, aux = self._writer(call.folder), self.own_aux() | call.aux
        writer.save(self.step, self.saved_state(), aux, replaced=self._replaced)
        self._replaced = False

    def saved_state(self) -> steps.State:
        """Return the part of the state that checkpoints store: all but frozen parameters."""
        return self._layout.unpadded(steps.saved_part(self._loaded()))

    def saved_template(self) -> steps.State:
        """Return `saved_state` as `jax.ShapeDtypeStruct`s with shardings; needs no loaded state."""
        return steps.saved_part(self._layout.stored)

    def own_aux(self) -> dict[str, Any]:
        """Return what every save adds to `aux`: the config and a record of the LoRA base model."""
        return {"config": self.config.as_dict()} | adapters.aux_entries(self._base)

    @_dispatch.register
    def _wait(self, _: Wait) -> None:
        if self._checkpoints is not None:
            self._checkpoints.wait()

    @_dispatch.register
    def _trace(self, call: Trace) -> str:
        jax.block_until_ready(self.state)
        try:
            self._tracing.close()
            if call.folder is not None and jax.process_index() in call.ranks:
                self._tracing.enter_context(traced(call.folder))
        except (InputError, OSError) as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Wait until the last save has finished, and unlock the model folder."""
        with contextlib.suppress(
            InputError, OSError
        ):  # the run has ended before its last traced step
            self._tracing.close()
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None

    @_dispatch.register
    def _restore(self, call: Restore) -> tuple[int, dict[str, Any] | None]:
        self._teacher  # noqa: B018  # loaded now, so that an unusable one is reported early
        checkpoints = self._writer(call.folder)
        newest = checkpoints.newest()
        if newest is None:
            check_vacant(call.folder)
            return self.step, None
        step = checkpoints.saved(newest)
        aux, where = step.aux, str(step)
        check_same_run(self.config, step.config, where)
        best = aux.get("best") or {}
        if best and best["step"] not in checkpoints.steps():  # deleted, or set aside as damaged
            aux = aux | {"best": best | {"step": None, "loss": None}}
        template = self.saved_template()
        saved = {path[0] for path in step.leaves}
        # There are no saved norms if the key skip_spikes is new.
        only = [key for key in template if key != "norms" or key in saved]
        restored = self._layout.fresh_history() | checkpoints.restore(newest, template, only=only)
        self.resume(newest, restored, aux, where, call.base)
        return newest, aux

    def resume(
        self,
        step: int,
        state: steps.State,
        aux: dict[str, Any],
        where: str,
        base: str | None = None,
    ) -> None:
        """Continue from a state that `saved_state` returned; load the base model for LoRA adapters.

        Args:
          step: number of completed updates of the state.
          aux: a dict that contains what `own_aux` returned when the state was saved.
          where: where the state was stored, for error messages.
          base: see `TrainableNetwork.restore`.
        """
        frozen = {}
        if (recorded := adapters.saved_base(aux, where)) is not None:
            places = [recorded.path, *([] if base is None else [base])]
            frozen, self._base = loading.load_base(where, self._layout, places, recorded)
        self._drop_weights(adapters=True)
        self.state = self._layout.padded(state | {"frozen": frozen})
        self.step, self._replaced, self._unchecked = step, False, True

    @_dispatch.register
    def _load(self, call: Load) -> None:
        self._drop_weights()
        source, optimizer = Source.of(call.path), not (call.fresh_opt or call.only_params)
        layout = self._layout.of_params if call.only_params else self._layout
        loaded = loading.load(source, layout, optimizer=optimizer)
        state = layout.padded(loaded.state)
        if "opt_state" not in state and not call.only_params:
            state["opt_state"] = steps.compile_opt_state(self._layout)(state["params"])
        self._drop_weights(adapters=True)
        self.step, self._base, self._replaced, self._unchecked = 0, loaded.base, True, True
        self.state = state | self._layout.fresh_history()

    def _writer(self, folder: str) -> Checkpoints:
        if self._checkpoints is None or self._folder != folder:
            self.close()
            keep_n, keep_every = self.config.keep_n, self.config.keep_every
            self._checkpoints = Checkpoints(folder, keep_n=keep_n, keep_every=keep_every)
            self._folder = folder
        return self._checkpoints

    def _loaded(self) -> steps.State:
        check_not_traced()
        if self.state is None:
            raise InputError("the model has no weights yet; call init, restore or load")
        return self.state

    def _params(self) -> Any:
        return steps.all_params(self._loaded())


def load(
    path: AnyPath | Source,
    config: Config | dict[str, Any] | AnyPath | None = None,
    *,
    changes: dict[str, Any] | None = None,
    optimizer: bool = False,
) -> CausalTransformer:
    """Return a model with the parameters at `path`, ready to evaluate, generate or fine-tune.

    Args:
      path: a model folder (its newest checkpoint is loaded), one of its step_N folders, a
        checkpoint of the original mesh-transformer-jax, a Hugging Face folder or a GGUF file.
      config: a Config, a dict of config keys and values (those that describe the model suffice), or
        the path of a config file; required for checkpoints of the original mesh-transformer-jax,
        which store none.  `end_tokens`, `chat_template` and `sampling` that it lacks are those of
        the checkpoint.  Default: the checkpoint's, with mp (`cores_per_replica`) reduced to a
        divisor of the number of accelerators, or to 1 on CPUs.  For the last two, the default
        `dtype` is bfloat16.
      changes: config keys whose values replace those of the config, such as `total_steps` to
        fine-tune, or `tpu_size` and `cores_per_replica` to load onto a mesh.
      optimizer: whether to load the optimizer's state too; otherwise training creates a fresh one.
    """
    source = Source.of(path)
    changes = changes or {}
    given = None if config is None else source.with_answer_keys(Config.of(config))
    fitted = (given or fit_to_devices(source.config, changes)).replace(**changes)
    assert fitted.tpu_size is not None
    use_virtual_devices(fitted.tpu_size)
    # The default is all devices, on which a config for fewer devices would get several replicas.
    devices = None if jax.process_count() > 1 else first_devices(fitted.tpu_size)
    network = CausalTransformer(fitted, devices=devices, init=False)
    network.load(source, only_params=not optimizer)
    return network


def _zeros(like: Array) -> Array:
    """Return zeros in the same place, which may be host memory, where devices do not compute."""
    return jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)


if not TYPE_CHECKING:  # A type checker should know only the names that exist.
    # Finds the names that the original mesh-transformer-jax defined here.
    __getattr__ = functools.partial(old_names.find, __name__)
