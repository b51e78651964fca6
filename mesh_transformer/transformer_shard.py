"""`CausalTransformer`: a model's state on a mesh, and the functions that train and evaluate it."""

import functools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import ArrayLike

from mesh_transformer import old_names
from mesh_transformer.checkpoint import adapters, loading
from mesh_transformer.checkpoint.native import Checkpoints
from mesh_transformer.checkpoint.source import Source, check_vacant
from mesh_transformer.checkpoint.state_tree import check_same_run
from mesh_transformer.config import Config
from mesh_transformer.data.loader import TFRecordNewInputs, open_train_set
from mesh_transformer.data.storage import AnyPath, local_path
from mesh_transformer.generation.batch import Batch, Generator
from mesh_transformer.generation.decode import Chosen
from mesh_transformer.mesh import accelerators
from mesh_transformer.mesh.declaration import joined
from mesh_transformer.mesh.devices import make_mesh, use_virtual_devices
from mesh_transformer.mesh.placement import Rows
from mesh_transformer.training import step as steps
from mesh_transformer.util import InputError

SPARE_DEVICES = 8  # minimum number of virtual CPU devices when a model is loaded without a config


class CausalTransformer:
    """A GPT-J model with its optimizer, sharded over a (dp, mp) mesh of JAX devices.

    If the devices belong to several processes, all of them must make the same calls.  A call then
    takes and returns the batch rows of this process's `replicas`, as numpy arrays; scalars are the
    same in all processes.  Without an accelerator, `config.tpu_size` virtual CPU devices are
    created, unless JAX's devices are already initialised.

    Args:
      config: a Config, a dict of its keys, or the path of a JSON or YAML file.
      devices: the mesh's devices (default: all).
      init: False creates no state, for a caller that restores one next.

    Attributes:
      step: number of updates done.
      state: the parameters, optimizer state and step on the devices, or None.
    """

    def __init__(
        self,
        config: Config | dict[str, Any] | str | os.PathLike[str],
        *,
        devices: Sequence[Any] | None = None,
        init: bool = True,
    ):
        self.config = _config_of(config)
        assert self.config.tpu_size is not None
        use_virtual_devices(self.config.tpu_size)
        self.mesh = make_mesh(self.config, devices)
        steps.check_zero(self.config, self.mesh)
        self._rows = Rows(self.mesh)
        self._generator = Generator(self.config, self.mesh, self._rows)
        self._checkpoints: Checkpoints | None = None
        self._folder: str | None = None  # the folder of `_checkpoints`, as the caller named it
        self.step = 0  # kept here too, because reading the state's step waits for the device
        self.state: steps.State | None = None
        self._base: adapters.Base | None = None  # the base model that the adapters are trained on
        if init:
            self.init()

    if not TYPE_CHECKING:  # A type checker should know only the attributes that exist.

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, naming the replacement if the original had the attribute."""
            if line := old_names.error_line(f"{__name__}.CausalTransformer.{name}"):
                raise AttributeError(line)
            return object.__getattribute__(self, name)  # raises the usual error

    def init(self) -> None:
        """Create fresh parameters and optimizer state from `config.seed`; the step becomes 0.

        Raises:
          InputError: with `lora_rank`, because adapters are trained on an existing model.
        """
        if self.config.lora_rank:
            raise InputError(
                f"config: lora_rank is {self.config.lora_rank}, but adapters are trained on an "
                "existing model; load one first (--tune-model-path)"
            )
        key = jax.random.key(self.config.seed)
        self.state = steps.compile_init(self.config, self.mesh)(key)
        self.step = 0

    @property
    def dp(self) -> int:
        """Number of replicas that the batch is split over."""
        return self.mesh.shape["dp"]

    @property
    def replicas(self) -> list[int]:
        """The dp replicas whose batch rows this process passes in and gets back, ascending."""
        return self._rows.replicas

    @property
    def batch_size(self) -> int:
        """Number of sequences per microbatch, over all replicas."""
        return self.config.per_replica_batch * self.dp

    @property
    def noise_batches(self) -> tuple[int, int]:
        """Numbers of sequences in the gradients of `grad_square_micro` and of `grad_norm`."""
        replicas = steps.gradient_replicas(self.config, self.mesh)
        accumulation = self.config.gradient_accumulation_steps
        return self.batch_size // replicas, self.batch_size * accumulation

    @property
    def peak_flops(self) -> float | None:
        """Peak FLOP/s of all of the mesh's devices together; None if unknown."""
        per_device = accelerators.peak_flops(self.mesh.devices.flat[0], self.config.dtype)
        return None if per_device is None else per_device * self.mesh.size

    @functools.cached_property
    def _train(self) -> Any:
        return steps.compile_train(self.config, self.mesh)

    @functools.cached_property
    def _eval(self) -> Any:
        return steps.compile_eval(self.config, self.mesh)

    @functools.cached_property
    def _logits(self) -> Any:
        return steps.compile_logits(self.config, self.mesh)

    def open_train_set(self) -> TFRecordNewInputs:
        """Open the config's training set, in batches for `train`."""
        return open_train_set(self.config, self.batch_size)

    def train(self, sample: dict[str, np.ndarray]) -> dict[str, Array]:
        """Run one optimizer update; returns without waiting for the devices.

        If only parameters have been loaded, fresh Adam moments are created first.

        Args:
          sample: token ids `obs` and `target` [A, B, T], A microbatches of B sequences.  B must be
            a multiple of the number of `replicas`.  Optionally `loss_mask` [A, B, T], 1 where a
            target counts in the loss and 0 elsewhere: losses are then means over the targets that
            count in all processes.  Optionally `segment_ids` [A, B, T]: each run of equal numbers
            is a text that does not see the others, as if it were in a sequence of its own.

        Returns:
          Device scalars: `loss` (z-loss included), `last_loss`, `grad_norm` (before clipping),
          `grad_norm_micro`, `grad_square_micro` and `learning_rate`.
        """
        batch = self._batch(sample, 3)
        if batch["obs"].shape[1] % len(self.replicas):
            raise InputError(
                f"train: the batch has {batch['obs'].shape[1]} sequences, "
                f"expected a multiple of the {len(self.replicas)} replicas"
            )
        state = self._loaded()
        self._generator.forget()
        if "opt_state" not in state:
            state["opt_state"] = self._fresh_moments(state)
        self.state, metrics = self._train(state, self._rows.place(batch, P(None, "dp")))
        self.step += 1
        return metrics

    def eval(self, sample: dict[str, np.ndarray]) -> dict[str, Any]:
        """Compute the losses of `target` after `obs`, without z-loss or `loss_mask`.

        Args:
          sample: token ids `obs` and `target` [B, T] with any B; optionally `segment_ids` [B, T],
            as for `train`.

        Returns:
          `loss` (mean over T) and `last_loss` [B], `all_loss` and `correct` [B, T].
        """
        batch = self._batch({key: x for key, x in sample.items() if key != "loss_mask"}, 2)
        rows = len(batch["obs"])
        batch = {key: self._rows.pad(tokens) for key, tokens in batch.items()}
        outputs = self._eval(self._params(), self._rows.place(batch, P("dp")))
        return {name: self._rows.fetch(x, rows) for name, x in outputs.items()}

    def logits(self, tokens: np.ndarray) -> Array | np.ndarray:
        """Return the next-token logits [B, T, V], in f32, after each of `tokens` [B, T]."""
        tokens = self._tokens("tokens", tokens, 2)
        padded = self._rows.place(self._rows.pad(tokens), P("dp"))
        return self._rows.fetch(self._logits(self._params(), padded), len(tokens))

    def score(self, tokens: np.ndarray, alternatives: int) -> Chosen:
        """Return the logprob of each of `tokens` [B, T] except the first, given the ones before it.

        Args:
          tokens: token ids; T is from 2 to `config.seq` + 1.
          alternatives: number of most likely tokens to return for each position.

        Returns:
          Numpy arrays [B, T - 1, ...], computed with the weights that `generate` reads.
        """
        tokens = self._tokens("tokens", tokens, 2, longest=self.config.seq + 1)
        return self._generator.score(self._own_params(), tokens, alternatives)

    def generate(
        self,
        ctx: ArrayLike,
        ctx_length: ArrayLike,
        gen_length: int,
        sampler_options: dict[str, Any] | None = None,
    ) -> np.ndarray:
        """Continue prompts; a row's answer depends only on its own prompt, settings and seed.

        Args:
          ctx: token ids [B, T], right-aligned; only the last `config.window` of a prompt are used.
            With several processes, T must be the same in all of them.
          ctx_length: number of prompt tokens in each row, [B], from 1 to T.
          gen_length: number of tokens to generate per row; beyond the window the oldest tokens are
            forgotten.
          sampler_options: `top_p` (default 0.9), `top_k` (default 0: off), `temp` (default 1; 0 is
            greedy), `repetition_penalty` (default 1: off) and `seed` (default 0), each one number
            or one per row.

        Returns:
          Token ids [B, gen_length], uint32.
        """
        return self._generator.generate(
            self._own_params(), ctx, ctx_length, gen_length, sampler_options or {}
        )

    def batch(self, rows: int) -> Batch:
        """Return a running batch of `rows` rows that generates with these parameters."""
        return self._generator.batch(self._own_params(), rows)

    def only_generate(self) -> None:
        """Keep only the weights that `generate`, `batch` and `score` read, and free the state.

        Other methods that need the state then raise InputError, until one is created or loaded.
        """
        self._generator.keep(self._params())
        self.state = None

    def claim(self, folder: str) -> None:
        """Lock a model folder against other writers until `close`; `save` does so as well.

        Raises:
          InputError: if another process writes to the folder, or it cannot be written.
        """
        self._writer(folder).claim()

    @property
    def save_failed(self) -> bool:
        """Whether the last save has failed in the background; `wait` raises the reason."""
        return self._checkpoints is not None and self._checkpoints.save_failed

    def save(self, folder: str, aux: dict[str, Any] | None = None) -> None:
        """Begin to save the state to `folder`/step_N in the background; `wait` waits for the end.

        With `lora_rank`, only the adapters, their moments and the location of their base are saved.

        Args:
          aux: further entries of the checkpoint's `aux`, which `restore` returns.
        """
        state = loading.saved_part(self._loaded(), self.config)
        own_aux = {"config": self.config.as_dict()} | adapters.told(self._base)
        self._writer(folder).save(self.step, state, own_aux | (aux or {}))

    def wait(self) -> None:
        """Wait for the last save; raises InputError if it failed."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def close(self) -> None:
        """Wait for the last save and unlock the model folder."""
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None

    def restore(self, folder: str, base: str | None = None) -> dict[str, Any] | None:
        """Resume from the newest checkpoint of a model folder.

        Args:
          base: for adapters, where to load their base model from if it has moved.

        Returns:
          The checkpoint's `aux`, or None if the folder has no checkpoint.

        Raises:
          InputError: if the checkpoint is of another model, or the folder of another format.
        """
        checkpoints = self._writer(folder)
        newest = checkpoints.newest()
        if newest is None:
            check_vacant(folder)
            return None
        step = checkpoints.saved(newest)
        aux, where = step.aux, str(step)
        check_same_run(self.config, step.config, where)
        template = loading.saved_part(steps.abstract_state(self.config, self.mesh), self.config)
        restored = checkpoints.restore(newest, template)
        if (recorded := adapters.saved_base(aux, where)) is not None:
            places = [recorded.path, *([] if base is None else [local_path(base)])]
            frozen, self._base = loading.load_base(where, self.config, self.mesh, places, recorded)
            restored["params"] = joined(frozen, restored["params"])
        self.state, self.step = restored, newest
        return aux

    def load(
        self, path: AnyPath | Source, *, fresh_opt: bool = False, only_params: bool = False
    ) -> None:
        """Load the parameters of a checkpoint in any of the three formats; the step becomes 0.

        Adam's moments are loaded too if the checkpoint has any, and otherwise created.

        Args:
          path: a model folder (its newest step), one of its step_N, or a Hugging Face folder.
            With `lora_rank`, a checkpoint without adapters is the base of fresh ones.
          fresh_opt: create fresh moments in any case.
          only_params: load and create no moments; `train` then creates them.

        Raises:
          InputError: if the checkpoint cannot be read, or is of another model than the config's.
        """
        optimizer = not fresh_opt and not only_params
        loaded = loading.load(Source.of(path), self.config, self.mesh, optimizer=optimizer)
        if "opt_state" not in loaded.state and not only_params:
            loaded.state["opt_state"] = self._fresh_moments(loaded.state)
        zero = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(self.mesh, P()))
        self.step, self._base = 0, loaded.base
        self.state = loaded.state | {"step": zero}

    def _fresh_moments(self, state: steps.State) -> Any:
        trained = loading.saved_part(state, self.config)["params"]
        return steps.compile_opt_state(self.config, self.mesh)(trained)

    def _writer(self, folder: str) -> Checkpoints:
        if self._checkpoints is None or self._folder != folder:
            self.close()
            keep_n, keep_every = self.config.keep_n, self.config.keep_every
            self._checkpoints = Checkpoints(folder, keep_n=keep_n, keep_every=keep_every)
            self._folder = folder
        return self._checkpoints

    def _loaded(self) -> steps.State:
        if self.state is None:
            raise InputError("the model has no weights yet; restore or load a checkpoint first")
        return self.state

    def _own_params(self) -> Any | None:
        """Return the parameters, or None without a state: generation may have kept its weights."""
        return None if self.state is None else self.state["params"]

    def _params(self) -> Any:
        return self._loaded()["params"]

    def _batch(self, sample: dict[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
        """Return the arrays of a sample, checked and in the dtypes that the model takes."""
        batch = {key: self._tokens(key, sample[key], rank) for key in ("obs", "target")}
        for key, dtype in (("loss_mask", np.uint8), ("segment_ids", np.int32)):
            if key in sample:
                batch[key] = np.asarray(sample[key]).astype(dtype, copy=False)
        for key, array in batch.items():
            if array.shape != batch["obs"].shape:
                raise InputError(
                    f"obs has shape {batch['obs'].shape}, but {key} has shape {array.shape}; "
                    "expected equal shapes"
                )
        return batch

    def _tokens(
        self, name: str, tokens: np.ndarray, rank: int, longest: int | None = None
    ) -> np.ndarray:
        """Return token ids as uint32, after checking dtype, shape and range."""
        tokens, longest = np.asarray(tokens), longest or self.config.seq
        if not np.issubdtype(tokens.dtype, np.integer):
            raise InputError(f"{name} has dtype {tokens.dtype}, expected integer token ids")
        if tokens.ndim != rank or not tokens.size or tokens.shape[-1] > longest:
            raise InputError(
                f"{name} has shape {tokens.shape}, expected {rank} non-empty dimensions, the last "
                f"at most {longest} (seq is {self.config.seq})"
            )
        if tokens.min() < 0 or tokens.max() >= self.config.n_vocab:
            raise InputError(
                f"{name} holds token id {max(tokens.max(), -tokens.min())}, outside the vocabulary "
                f"(n_vocab is {self.config.n_vocab})"
            )
        return tokens.astype(np.uint32)


def _config_of(config: Config | dict[str, Any] | AnyPath) -> Config:
    """Return `Config.of(config)`.

    Raises:
      InputError: for a dict with keys of the original's `params`, naming their replacements.
    """
    if isinstance(config, dict) and (line := old_names.keys_line(config)):
        raise InputError(f"config: {line}")
    return Config.of(config)


def load(
    path: AnyPath | Source,
    config: Config | dict[str, Any] | AnyPath | None = None,
    *,
    optimizer: bool = False,
) -> CausalTransformer:
    """Return a model with the parameters at `path`, ready to evaluate, generate or fine-tune.

    Args:
      path: a model folder (its newest checkpoint), one step_N of it, or a Hugging Face folder.
      config: a Config, a dict or a path; a dict needs only the keys that describe the model.
        Default: the checkpoint's own config, with mp reduced to a divisor of the number of
        accelerators, or to 1 on CPUs, where one device uses all cores.  Original checkpoints have
        no config.
      optimizer: whether to load Adam's moments too; otherwise training creates fresh ones.
    """
    source = Source.of(path)
    fitted = _fitted(source.config) if config is None else _config_of(config)
    assert fitted.tpu_size is not None
    use_virtual_devices(fitted.tpu_size)
    # On all devices, which are the default, a config for one device would become replicas.
    devices = None if jax.process_count() > 1 else jax.devices()[: fitted.tpu_size]
    network = CausalTransformer(fitted, devices=devices, init=False)
    network.load(source, only_params=not optimizer)
    return network


def _fitted(saved: Config) -> Config:
    """Return a saved config adapted to the present devices.

    mp becomes the largest common divisor of its saved value and the number of devices.  On CPUs it
    becomes 1: virtual devices would share the same cores, and add communication.  `attention`
    becomes "auto", because the saved backend was chosen for the devices that trained it.
    """
    saved = saved.replace(attention="auto")
    assert saved.tpu_size is not None
    # With some to spare: their number is fixed once JAX has started, and another model loaded later
    # may need more.
    use_virtual_devices(saved.tpu_size * -(-SPARE_DEVICES // saved.tpu_size))
    if saved.norm == "layernorm-desync":
        return saved  # its parameters depend on mp
    on_cpu = jax.default_backend() == "cpu"
    shards = 1 if on_cpu else math.gcd(saved.cores_per_replica, jax.device_count())
    return saved.replace(cores_per_replica=shards, tpu_size=shards, zero=0)


if not TYPE_CHECKING:  # A type checker should know only the names that exist.

    def __getattr__(name: str) -> Any:
        """Return what a name of the original's module stands for now, or raise an error."""
        return old_names.find(__name__, name)
