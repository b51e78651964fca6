"""`CausalTransformer`: a model's state on its mesh, and the compiled functions over it."""

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

SPARE_DEVICES = 8  # virtual CPU devices, at least, where a model's own number is not given


class CausalTransformer:
    """A GPT-J with its optimizer, sharded over a (dp, mp) mesh of JAX's devices.

    Where these belong to several processes, all of them make the same calls.  A call then takes
    and returns the rows of this process's `replicas`, as numpy arrays; scalars are everyone's.
    Without an accelerator, `config.tpu_size` virtual CPU devices appear, unless the caller has
    already set JAX's devices up.

    Args:
      config: a Config, a dict of its keys, or the path of a JSON or YAML file.
      devices: the mesh's devices (default: all).
      init: False leaves the state out, for a caller that restores one at once.
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
        self._folder: str | None = None  # that of `_checkpoints`, as the caller named it
        self.step = 0  # updates done, known without waiting for the device
        self.state: steps.State | None = None
        self._base: adapters.Base | None = None  # what adapters are trained on
        if init:
            self.init()

    if not TYPE_CHECKING:  # A type checker should know only the attributes that exist.

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, naming the replacement of an attribute of the original's."""
            if line := old_names.error_line(f"{__name__}.CausalTransformer.{name}"):
                raise AttributeError(line)
            return object.__getattribute__(self, name)  # raises the error that led here

    def init(self) -> None:
        """Fresh weights and optimizer from `config.seed`; the step becomes 0.

        Raises InputError with `lora_rank`: adapters are trained on a model that there is.
        """
        if self.config.lora_rank:
            raise InputError(
                f"config: lora_rank is {self.config.lora_rank}: adapters are trained on a model; "
                "load one first (--tune-model-path)"
            )
        key = jax.random.key(self.config.seed)
        self.state = steps.compile_init(self.config, self.mesh)(key)
        self.step = 0

    @property
    def dp(self) -> int:
        """How many replicas the batch is split over."""
        return self.mesh.shape["dp"]

    @property
    def replicas(self) -> list[int]:
        """Those of the dp replicas whose rows this process gives and gets, ascending."""
        return self._rows.replicas

    @property
    def batch_size(self) -> int:
        """Sequences in one microbatch over all replicas."""
        return self.config.per_replica_batch * self.dp

    @property
    def noise_batches(self) -> tuple[int, int]:
        """Sequences behind `grad_square_micro` and behind `grad_norm`."""
        replicas = steps.gradient_replicas(self.config, self.mesh)
        accumulation = self.config.gradient_accumulation_steps
        return self.batch_size // replicas, self.batch_size * accumulation

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s that all of the mesh's devices can do together; None where not known."""
        one = accelerators.peak_flops(self.mesh.devices.flat[0], self.config.dtype)
        return None if one is None else one * self.mesh.size

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
        """The batches that the config trains on."""
        return open_train_set(self.config, self.batch_size)

    def train(self, sample: dict[str, np.ndarray]) -> dict[str, Array]:
        """One optimizer update; returns at once, before the devices are done.

        Weights that were loaded alone get fresh moments first.

        Args:
          sample: token ids `obs` and `target` [A, B, T]; B divides by the number of `replicas`.
            Maybe `loss_mask` [A, B, T], 1 where a target bears loss and 0 elsewhere: losses are
            then means over all that do, of all processes.  Maybe `segment_ids` [A, B, T]: each
            run of one number is a text that does not see the others, as if in a sequence alone.

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
        """Losses of `target` after `obs`, both token ids [B, T], any B; no z-loss, no mask.

        There may be `segment_ids`, as for `train`.

        Returns:
          `loss` (mean over T) and `last_loss` [B], `all_loss` and `correct` [B, T].
        """
        batch = self._batch({key: x for key, x in sample.items() if key != "loss_mask"}, 2)
        rows = len(batch["obs"])
        batch = {key: self._rows.pad(tokens) for key, tokens in batch.items()}
        found = self._eval(self._params(), self._rows.place(batch, P("dp")))
        return {name: self._rows.fetch(x, rows) for name, x in found.items()}

    def logits(self, tokens: np.ndarray) -> Array | np.ndarray:
        """Next-token logits [B, T, V] in f32 after each of `tokens` [B, T]."""
        tokens = self._tokens("tokens", tokens, 2)
        padded = self._rows.place(self._rows.pad(tokens), P("dp"))
        return self._rows.fetch(self._logits(self._params(), padded), len(tokens))

    def score(self, tokens: np.ndarray, alternatives: int) -> Chosen:
        """What the model thinks of each of `tokens` [B, T] but the first, given those before it.

        Args:
          tokens: at least two in a row, at most one more than `config.seq`.
          alternatives: how many of the likeliest tokens in its place to tell.

        Returns:
          As numpy arrays [B, T - 1, ...], of the weights that `generate` reads.
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
        """Continues prompts; a row's answer depends on its own prompt, settings and seed alone.

        Args:
          ctx: token ids [B, T], right-aligned; of more than `config.window` the last are used.
            Of several processes, all give the same T.
          ctx_length: how many of a row's T are its prompt, [B], at least 1.
          gen_length: tokens to add to each row; past the window the oldest are forgotten.
          sampler_options: `top_p` (0.9), `top_k` (0: off), `temp` (1; 0 is greedy),
            `repetition_penalty` (1: off) and `seed` (0), each one number or one a row.

        Returns:
          Token ids [B, gen_length], uint32.
        """
        return self._generator.generate(
            self._own_params(), ctx, ctx_length, gen_length, sampler_options or {}
        )

    def batch(self, rows: int) -> Batch:
        """A running batch of `rows` rows on these weights; prompts come and go (see `Batch`)."""
        return self._generator.batch(self._own_params(), rows)

    def only_generate(self) -> None:
        """Keeps what `generate`, `batch` and `score` read and lets the state go, and its memory.

        Nothing else works then, until a state is made or loaded.
        """
        self._generator.keep(self._params())
        self.state = None

    def claim(self, folder: str) -> None:
        """Keeps other writers out of a model folder until `close`; `save` does by itself.

        Raises InputError where one is there already, or nothing can be written there.
        """
        self._writer(folder).claim()

    @property
    def save_failed(self) -> bool:
        """Whether the last save has failed in the background; `wait` raises why."""
        return self._checkpoints is not None and self._checkpoints.save_failed

    def save(self, folder: str, aux: dict[str, Any] | None = None) -> None:
        """Begins to write the state to `folder`/step_N; `wait` ends it.  Training may go on.

        With `lora_rank` what is written are the adapters, their moments, and where their base is.
        """
        state = loading.saved_part(self._loaded(), self.config)
        told = {"config": self.config.as_dict()} | adapters.told(self._base)
        self._writer(folder).save(self.step, state, told | (aux or {}))

    def wait(self) -> None:
        """Waits for the last save; raises InputError where it failed."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def close(self) -> None:
        """Waits for the last save and lets the model folder go."""
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None

    def restore(self, folder: str, base: str | None = None) -> dict[str, Any] | None:
        """Goes on from a model folder's newest checkpoint: its `aux`, or None without one.

        Of adapters the base comes from where it was, or else from `base`.

        Raises:
          InputError: where it holds another model's, or one of another format.
        """
        checkpoints = self._writer(folder)
        newest = checkpoints.newest()
        if newest is None:
            check_vacant(folder)
            return None
        step = checkpoints.saved(newest)
        aux, where = step.aux, str(step)
        check_same_run(self.config, step.config, where)
        wanted = loading.saved_part(steps.abstract_state(self.config, self.mesh), self.config)
        restored = checkpoints.restore(newest, wanted)
        if (recorded := adapters.saved_base(aux, where)) is not None:
            places = [recorded.path, *([] if base is None else [local_path(base)])]
            frozen, self._base = loading.load_base(where, self.config, self.mesh, places, recorded)
            restored["params"] = joined(frozen, restored["params"])
        self.state, self.step = restored, newest
        return aux

    def load(
        self, path: AnyPath | Source, *, fresh_opt: bool = False, only_params: bool = False
    ) -> None:
        """Takes the weights of `path`, of any of the three formats; the step becomes 0.

        `path` is a model folder (its newest step), one of its step_N, or a Hugging Face folder.
        Adam's moments come along where there are any, else they are made anew, as `fresh_opt`
        makes them in any case; `only_params` leaves them out until the model is trained.  With
        `lora_rank` a `path` without adapters is the base of fresh ones.

        Raises:
          InputError: where it cannot be read, or is of another model than the config's.
        """
        optimizer = not fresh_opt and not only_params
        found = loading.load(Source.of(path), self.config, self.mesh, optimizer=optimizer)
        if "opt_state" not in found.state and not only_params:
            found.state["opt_state"] = self._fresh_moments(found.state)
        zero = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(self.mesh, P()))
        self.step, self._base = 0, found.base
        self.state = found.state | {"step": zero}

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
        """The parameters, or None where generation may have kept their weights."""
        return None if self.state is None else self.state["params"]

    def _params(self) -> Any:
        return self._loaded()["params"]

    def _batch(self, sample: dict[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
        batch = {key: self._tokens(key, sample[key], rank) for key in ("obs", "target")}
        for key, dtype in (("loss_mask", np.uint8), ("segment_ids", np.int32)):
            if key in sample:
                batch[key] = np.asarray(sample[key]).astype(dtype, copy=False)
        for key, found in batch.items():
            if found.shape != batch["obs"].shape:
                raise InputError(
                    f"obs is {batch['obs'].shape}, {key} {found.shape}; expected the same"
                )
        return batch

    def _tokens(
        self, name: str, tokens: np.ndarray, rank: int, longest: int | None = None
    ) -> np.ndarray:
        """Token ids as the model takes them, checked against their number and the vocabulary."""
        tokens, longest = np.asarray(tokens), longest or self.config.seq
        if not np.issubdtype(tokens.dtype, np.integer):
            raise InputError(f"{name} is {tokens.dtype}, expected integer token ids")
        if tokens.ndim != rank or not tokens.size or tokens.shape[-1] > longest:
            raise InputError(
                f"{name} is {tokens.shape}, expected {rank} non-empty dimensions, the last at most "
                f"{longest} (seq is {self.config.seq})"
            )
        if tokens.min() < 0 or tokens.max() >= self.config.n_vocab:
            raise InputError(
                f"{name} holds token id {max(tokens.max(), -tokens.min())}, outside the vocabulary "
                f"of n_vocab {self.config.n_vocab}"
            )
        return tokens.astype(np.uint32)


def _config_of(config: Config | dict[str, Any] | AnyPath) -> Config:
    """Return `Config.of(config)`; InputError names what replaces old keys, which only dicts had."""
    if isinstance(config, dict) and (line := old_names.keys_line(config)):
        raise InputError(f"config: {line}")
    return Config.of(config)


def load(
    path: AnyPath | Source,
    config: Config | dict[str, Any] | AnyPath | None = None,
    *,
    optimizer: bool = False,
) -> CausalTransformer:
    """A model with the weights at `path`, ready to evaluate, generate or fine-tune.

    Args:
      path: a model folder (its newest checkpoint), one step_N of it, or a Hugging Face folder.
      config: a Config, a dict or a path; of a dict only the model's own keys are required.
        Default: the checkpoint's own, on as many accelerators as divide its mp, or on one CPU
        device, which has all cores.  The original's checkpoints have none.
      optimizer: take Adam's moments too; otherwise training makes fresh ones.
    """
    source = Source.of(path)
    fitted = _fitted(source.config) if config is None else _config_of(config)
    assert fitted.tpu_size is not None
    use_virtual_devices(fitted.tpu_size)
    # Without this a config of one device would be copied to all of them.
    devices = None if jax.process_count() > 1 else jax.devices()[: fitted.tpu_size]
    network = CausalTransformer(fitted, devices=devices, init=False)
    network.load(source, only_params=not optimizer)
    return network


def _fitted(saved: Config) -> Config:
    """A saved config for the devices here: the largest mp that divides its own and theirs.

    How attention is computed was chosen for the devices that trained it.

    Virtual CPU devices would share the same cores, and talk to each other besides.
    """
    saved = saved.replace(attention="auto")
    assert saved.tpu_size is not None
    # Some to spare: their number cannot change once JAX runs, and another model may want more.
    use_virtual_devices(saved.tpu_size * -(-SPARE_DEVICES // saved.tpu_size))
    if saved.norm == "layernorm-desync":
        return saved  # its parameters are those of one mp
    on_cpu = jax.default_backend() == "cpu"
    shards = 1 if on_cpu else math.gcd(saved.cores_per_replica, jax.device_count())
    return saved.replace(cores_per_replica=shards, tpu_size=shards, zero=0)


if not TYPE_CHECKING:  # A type checker should know only the names that exist.

    def __getattr__(name: str) -> Any:
        """Return what a name of the original's stands for, or raise an error that says so."""
        return old_names.find(__name__, name)
