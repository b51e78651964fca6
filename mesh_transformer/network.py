"""Networks, independent of where they run: their methods, and the calls that these make.

A method of `Network` checks its arguments and runs a call, such as `Score`.  Three classes run
calls: `CausalTransformer` on the devices of this process, `Fleet` on those of several processes,
and `RestartingCluster` on a fleet that is started again when one of its hosts fails.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike

from mesh_transformer import status_lines
from mesh_transformer.calls import MICROBATCH_ROWS, ROWS, Call, Result, StateCall
from mesh_transformer.config import Config
from mesh_transformer.data.batches import (
    TEACHER_KEYS,
    VALUE_KEYS,
    check_batch,
    check_groups,
    check_tokens,
)
from mesh_transformer.generation.batch import BadWeights, Batch, Embed, Score, filled
from mesh_transformer.generation.decode import Chosen
from mesh_transformer.generation.pool import Pool
from mesh_transformer.generation.prompts import check_pooled, check_prompts
from mesh_transformer.generation.sampling_settings import sampler_settings
from mesh_transformer.generation.stream import stream_tokens
from mesh_transformer.storage.access import AnyPath, local_path
from mesh_transformer.util import InputError, bucket


@dataclass(frozen=True, eq=False)
class Eval(Call[dict[str, Any]]):
    """See `Network.eval`."""

    batch: dict[str, np.ndarray] = field(metadata=ROWS)
    base: bool = False
    returns_rows: ClassVar[bool] = True


@dataclass(frozen=True)
class Checksum(Call[str]):
    """See `Network.checksum`."""


@dataclass(frozen=True)
class AddAdapters(StateCall[None]):
    """See `Network.add_adapters`."""

    paths: list[Any]


@dataclass(frozen=True)
class AddDraft(StateCall[None]):
    """See `Network.add_draft`."""

    path: Any


@dataclass(frozen=True)
class OnlyGenerate(StateCall[None]):
    """See `Network.only_generate`."""


@dataclass(frozen=True)
class Init(StateCall[None]):
    """See `TrainableNetwork.init`."""


@dataclass(frozen=True)
class Load(StateCall[None]):
    """See `TrainableNetwork.load`."""

    path: Any
    fresh_opt: bool
    only_params: bool


@dataclass(frozen=True)
class Restore(StateCall[tuple[int, dict[str, Any] | None]]):
    """Return the step, and the result of `TrainableNetwork.restore`."""

    folder: str
    base: str | None


@dataclass(frozen=True)
class Claim(StateCall[None]):
    """See `TrainableNetwork.claim`."""

    folder: str
    room: bool = False


@dataclass(frozen=True)
class SetAside(StateCall[str]):
    """See `TrainableNetwork.set_aside`."""

    step: str


@dataclass(frozen=True)
class Save(StateCall[None]):
    """See `TrainableNetwork.save`."""

    folder: str
    aux: dict[str, Any]


@dataclass(frozen=True)
class Wait(StateCall[None]):
    """See `TrainableNetwork.wait`."""


@dataclass(frozen=True)
class Trace(Call[str]):
    """See `TrainableNetwork.trace`; only the processes of these ranks have a trace."""

    folder: str | None
    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True, eq=False)
class Train(Call[dict[str, Any]]):
    """See `TrainableNetwork.train`; without a batch, each host trains on the one it has read."""

    batch: dict[str, np.ndarray] | None = field(metadata=MICROBATCH_ROWS)


class Network:
    """A model that can generate text and score it.

    Attributes:
      config: the config, as a `Config`.
      dp: number of data-parallel replicas; each holds the same number of batch rows.
      batch_size: number of sequences per microbatch, summed over all replicas.
      objective: see `TrainableNetwork.set_objective`; None for a network that does not train.
    """

    config: Config
    dp: int
    batch_size: int
    objective: Callable[[Any], Any] | None = None

    def run(self, call: Call[Result]) -> Result:
        """Run a call, and return its result."""
        raise NotImplementedError

    @property
    def adapters(self) -> int:
        """Number of LoRA adapters that each text may choose from."""
        raise NotImplementedError

    @property
    def alone(self) -> bool:
        """Whether no other process has to make the same calls."""
        return True

    @property
    def own_replicas(self) -> Sequence[int]:
        """Replicas whose batch rows the caller passes in and gets back."""
        return range(self.dp)

    def batch(self, rows: int, pool: Pool | None = None, guesses: int = 0) -> Batch:
        """Return a `Batch` of idle rows, which generates with the current parameters.

        The hosts of a pod hold only the newest batch; methods of an older one raise InputError.

        Args:
          rows: number of rows, a multiple of the number of `own_replicas`.
          pool: the size of each replica's pool of blocks (see `Pool`); None for none.
          guesses: number of tokens that a decode step may guess (see `Batch.decode`).
        """
        return Batch(
            self.run,
            self.config,
            rows,
            len(self.own_replicas),
            adapters=self.adapters,
            pool=pool,
            guesses=guesses,
        )

    def generate(
        self,
        ctx: ArrayLike,
        ctx_length: ArrayLike,
        gen_length: int,
        sampler_options: dict[str, Any] | None = None,
    ) -> np.ndarray:
        """Continue prompts; each answer depends only on its own prompt, settings and seed.

        An answer ends at the first of the config's `end_tokens`, which fills the rest of its row.

        Args:
          ctx: token ids [B, T], one right-aligned prompt per row; only the last `config.window`
            tokens of a prompt are used.  With several processes, T must be the same in all of them.
          ctx_length: number of prompt tokens in each row, [B], from 1 to T.
          gen_length: number of tokens to generate per row.  Each token attends to at most the last
            `config.window` tokens of its row.
          sampler_options: `top_p` (default 0.9), `temp` (default 1; 0 is greedy), `seed` (default:
            random for each row; with several processes, 0), and, by default off, `top_k`, `min_p`,
            `typical_p`, `repetition_penalty`, `presence_penalty`, `frequency_penalty`, `logit_bias`
            and `adapter` (see `add_adapters`).  Each value is one for all rows, or an array with
            one per row.  One `seed` s for all rows gives row number n, from 0, the seed s + n.

        Returns:
          Token ids [B, gen_length], uint32.

        Raises:
          InputError: for an invalid argument or option.
          NonFiniteError: if the model's logits are NaN or infinite.
        """
        prompts = check_prompts(ctx, ctx_length, gen_length)
        options = sampler_options or {}
        settings = sampler_settings(options, len(prompts))
        size = bucket(-(-len(prompts) // len(self.own_replicas)), 1)
        batch = self.batch(size * len(self.own_replicas))
        longest = None
        if not self.alone:
            # All processes must compile for the same sizes.  The width of `ctx` is the same in all
            # processes, but the length of the longest prompt may differ.
            longest = np.shape(ctx)[1]
            batch.reserve(longest + gen_length)
            if np.ndim(options.get("seed", 0)) == 0:
                # Processes that share a replica must agree on the seeds of its rows.  So rows are
                # counted over all processes, and the first seed is 0, not a random number.
                row = np.arange(len(prompts))
                row = np.array(self.own_replicas)[row // size] * size + row % size
                first = settings.seed_B[0] if "seed" in options else 0
                settings = settings._replace(seed_B=(first + row).astype(np.uint32))
        insert = functools.partial(batch.insert, longest=longest)
        ends, parts = self.config.end_tokens or (), []
        running = np.ones(len(prompts), bool)
        for new in stream_tokens(batch, prompts, gen_length, settings, insert=insert):
            parts.append(new)
            running &= ~np.isin(new, ends).any(axis=1)
            if self.alone and not running.any():  # else all processes make the same calls
                break
        return filled(np.concatenate(parts, axis=1), ends, gen_length)

    def bad_weights(self) -> str | None:
        """Name the weights that are NaN or infinite; "" if there are none."""
        return self.run(BadWeights())

    def eval(self, sample: dict[str, np.ndarray], *, base: bool = False) -> dict[str, Any]:
        """Compute the losses of predicting `target` from `obs`, without z-loss.

        Args:
          sample: a dict of token ids `obs` and `target` [B, T] with any B; optionally `segment_ids`
            [B, T], as for `train`.  Other keys of a batch and `ctx_length` are not used.
          base: whether to leave out the LoRA adapters that are trained.

        Returns:
          `all_loss` (in nats) and `correct` (whether `target` was the most likely token), both
          [B, T]; `loss` (the mean of `all_loss` over T) and `last_loss` (`all_loss` at the last
          position), both [B].
        """
        batch = check_batch(self.config, "eval", sample, 2, ignored="ctx_length")
        for key in ("loss_mask", *VALUE_KEYS, *TEACHER_KEYS):
            batch.pop(key, None)
        return self.run(Eval(batch, base))

    def checksum(self) -> str:
        """Return a digest of the parameters, which is the same on every mesh.

        LoRA adapters that change nothing, as new ones, do not count.
        """
        return self.run(Checksum())

    def score(
        self,
        tokens: ArrayLike,
        alternatives: int,
        beginning: ArrayLike | None = None,
        adapter: int = 0,
    ) -> Chosen:
        """Return each token's logprob given the tokens before it; a row's first token has none.

        Args:
          tokens: token ids [B, T]; T is from 2 to `config.seq` + 1.
          alternatives: number of most likely tokens to return for each position, from 0 to n_vocab.
          beginning: token ids [S] of a text that all rows continue; together they have at most
            `config.seq` + 1 tokens.  Its keys and values are computed once, and kept for the next
            call with the same beginning.
          adapter: number of the adapter that all rows use, or 0 for none; see
            `CausalTransformer.add_adapters`.

        Returns:
          A `Chosen` tuple of numpy arrays: [B, T - 1], and [B, T - 1, alternatives] for the most
          likely tokens.  As in `generate`, weights are f32 on CPUs, elsewhere in `config.dtype`.
        """
        longest = self.config.seq + 1
        if beginning is not None:
            beginning = check_tokens(self.config, "beginning", beginning, 1, longest=longest - 2)
            longest -= len(beginning)
        tokens = check_tokens(self.config, "tokens", tokens, 2, longest=longest)
        return self.run(Score(tokens, alternatives, beginning, adapter))

    def embed(
        self, tokens: ArrayLike, lengths: ArrayLike, pooling: str = "mean", adapter: int = 0
    ) -> np.ndarray:
        """Return a vector for each text, from the last layer's normed output.

        Args:
          tokens: token ids [B, T], one left-aligned text per row; T is at most `config.seq`.
          lengths: number of tokens of each text, [B], from 1 to T.
          pooling: "mean" for the mean over the text's tokens, "last" for the last token's vector.
          adapter: as for `score`.

        Returns:
          An f32 array [B, D].  The vectors are not scaled to length 1.

        Raises:
          InputError: if an argument is invalid.
        """
        texts = check_tokens(self.config, "tokens", tokens, 2)
        sizes = check_pooled(texts, lengths, pooling)
        return self.run(Embed(texts, sizes, pooling, adapter))

    def add_adapters(self, paths: Sequence[AnyPath]) -> None:
        """Let each text choose one of these LoRA adapters, instead of those given before.

        A text that is generated with the option `adapter` n uses number n of the adapters, counted
        from 1, and with 0 none.  Call this before `only_generate`.

        Args:
          paths: checkpoints of adapters that were trained on this model.
        """
        self.run(AddAdapters(list(map(_absolute, paths))))

    def add_draft(self, path: AnyPath) -> None:
        """Let a smaller model guess tokens in batches that guess (see `batch`).

        The guesses do not change which tokens are generated.

        Args:
          path: a checkpoint of a model with the same tokenizer, which is put on the same mesh.
        """
        self.run(AddDraft(_absolute(path)))

    def only_generate(self) -> None:
        """Free the state, but not the weights that `generate`, `batch`, `score` and `embed` use.

        Other methods that need the state raise InputError until a state is created or loaded again.
        """
        self.run(OnlyGenerate())


def _absolute(path: AnyPath) -> Any:
    """Return the path as all hosts need it; a `Source` is returned unchanged."""
    return local_path(path) if isinstance(path, str | PurePath) else path


class TrainSet(Protocol):
    """A stream of training batches that can save and restore its position.

    Its methods are those of `TFRecordNewInputs`.
    """

    def get_samples(self) -> dict[str, np.ndarray]: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any] | None, batches: int = 0) -> None: ...
    def close(self) -> None: ...


class TrainableNetwork(Network):
    """A network with its optimizer; see `CausalTransformer`.

    `train` starts a training step and returns its metrics without waiting for the step to finish.
    Calling `float` on a metric blocks until the step has finished.  The metric's method `is_ready`
    returns whether the step has finished.

    Attributes:
      noise_batches: the batch sizes (small, big), in sequences, for estimating the gradient noise
        scale.  Of the metrics of `train`, `grad_square_micro` is that of small batches: one
        replica's part of a microbatch (with ZeRO 3, the whole microbatch).  `grad_norm` is that of
        a big batch: all sequences of an update, after the ramp of `batch_ramp_steps`.
      peak_flops: total peak dense bf16 FLOP/s of the devices, from their data sheet; None if
        unknown.
      step: number of completed optimizer updates.
      notice: the event that announces the shutdown of a host's machine, such as "host 1 received
        SIGTERM"; "" if there is none.
    """

    step: int
    notice: str = ""
    noise_batches: tuple[int, int]
    peak_flops: float | None

    @functools.cached_property
    def signals(self) -> list[int]:
        """Signals that its processes have received; the first one ends a training run.

        `training.loop.train` adds the signals of its own process.
        """
        return []

    def init(self) -> None:
        """Initialise parameters and optimizer state from `config.seed`, and set the step to 0.

        Raises:
          InputError: if the config sets `lora_rank`, because LoRA adapters need an existing model.
        """
        with status_lines.doing("initialising the weights"):
            self.run(Init())
        self.step = 0

    def load(self, path: AnyPath, *, fresh_opt: bool = False, only_params: bool = False) -> None:
        """Load a checkpoint's parameters and set the step to 0.

        The optimizer's state is loaded too if the checkpoint has one; otherwise a fresh one is
        created.

        Args:
          path: a model folder (its newest checkpoint is loaded), one of its step_N folders, a
            checkpoint of the original mesh-transformer-jax, a Hugging Face folder or a GGUF file.
            If the config sets `lora_rank` and the checkpoint has no adapters, the checkpoint
            becomes the base model of new adapters.
          fresh_opt: whether to create a fresh optimizer state even if the checkpoint has one.
          only_params: if True, the optimizer's state is neither loaded nor created; the first
            `train` creates it.

        Raises:
          InputError: if the checkpoint cannot be read or does not fit the config, or if its
            optimizer's state is that of another optimizer.
        """
        with status_lines.doing("loading the weights"):
            self.run(Load(_absolute(path), fresh_opt, only_params))
        self.step = 0

    def restore(self, folder: AnyPath, base: AnyPath | None = None) -> dict[str, Any] | None:
        """Resume from the newest checkpoint of a model folder.

        Args:
          base: the new path of the base model, if the checkpoint holds LoRA adapters and their
            base model has moved.

        Returns:
          The dict of the checkpoint: the entries that were passed to `save`, the run's config, and
          a record of the LoRA base model; or None if the folder has no checkpoint.

        Raises:
          InputError: if the checkpoint does not fit the config or has another format, or if the
            hosts of a pod do not share the folder.
        """
        where = None if base is None else local_path(base)
        with status_lines.doing("restoring the newest checkpoint"):
            self.step, aux = self.run(Restore(local_path(folder), where))
        return aux

    def set_aside(self, step: str) -> str:
        """Rename a damaged checkpoint folder, and return its new name."""
        return self.run(SetAside(step))

    def claim(self, folder: AnyPath, *, room: bool = False) -> None:
        """Lock a model folder against other writers until `close`.

        `save` also locks the folder, if it is not locked yet.

        Args:
          room: whether to check that its disk has room for a checkpoint.

        Raises:
          InputError: if another process has locked the folder, if the folder cannot be written, if
            the hosts do not share it, or if its disk lacks room.
        """
        self.run(Claim(local_path(folder), room))

    def save(self, folder: AnyPath, aux: dict[str, Any] | None = None) -> None:
        """Start saving the state in the background, to `folder`/step_N, where N is `step`.

        Call `wait` to be sure that the save has succeeded.  A single process that ends waits, too,
        but a failure does not change its exit status.  Of several hosts, all save their parts, or
        the save fails.  Nothing is saved if the last call of `save` or `restore` was for this
        folder and step, and `init` or `load` did not follow.  If the config sets `lora_rank`, only
        the path and checksums of the base model are saved.

        Args:
          aux: JSON values to save with the state; `restore` returns them in its dict.  For the
            entry `best`, see `Checkpoints.save`.

        Raises:
          InputError: as `Checkpoints.save`, for example if another state has this step's number.
        """
        self.run(Save(local_path(folder), aux or {}))

    def wait(self) -> None:
        """Wait until the last save has finished; raise InputError if it failed."""
        self.run(Wait())

    @property
    def save_failed(self) -> bool:
        """Whether the last save has failed in the background; `wait` raises the error."""
        raise NotImplementedError

    def larger_mesh(self) -> str:
        """Return why a restart would give the run a larger mesh; "" if it would not."""
        return ""

    def set_objective(self, objective: Callable[[Any], Any] | None) -> None:
        """Let `train` minimise a function of log-probabilities; None for the config's objective.

        Args:
          objective: a function of `training.objectives.Texts`, which returns a loss per group
            [B, N] or per text [B, N, K].  It may also return a dict of metrics: per group, per
            text (which gives two, `name/chosen` and `name/rejected`), or scalars.  If the config's
            objective is grpo, a function of `training.objectives.Tokens`, which returns a loss per
            token [B, T], and metrics per token or scalars.

        Raises:
          InputError: if the network is not in this process, or the function does not return this.
        """
        raise InputError("a function as objective needs a network in this process; give its name")

    def open_train_set(self) -> TrainSet:
        """Open `config.train_set`; return an iterator over batches that `train` accepts."""
        raise NotImplementedError

    def train(self, sample: dict[str, np.ndarray]) -> dict[str, Any]:
        """Run one optimizer update; return its metrics without waiting for the devices.

        If 16 earlier calls have not finished on the devices, the call waits for the oldest.  On a
        pod, it waits if the metrics of 4 earlier calls have not been read.

        Args:
          sample: token ids `obs` and `target` [A, B, T]: A microbatches of B sequences, where B is
            a multiple of the number of replicas, and T one of `config.position_multiple`.  With
            `batch_ramp_steps`, A is at most `gradient_accumulation_steps`, and may differ from call
            to call.  Optionally `loss_mask` [A, B, T], 1 where a target counts in the loss and 0
            elsewhere; losses are then means over all targets of the update that count, and if none
            counts, the update is skipped with an `UncountedWarning`.  Optionally
            `segment_ids` [A, B, T]: each run of equal numbers marks one text, which is processed as
            if it were in a sequence of its own.  An objective requires both, and may require
            `reference` [A, B, T], f32: in each row, the sums of log p of its texts under the
            reference, in the order of their segment numbers from 1, then zeros.  The objective grpo
            requires `loss_mask` and `advantage`, f32, and takes `sampled`, `old` and `reference`,
            the log p of each target (see `training.objectives.Tokens`).  The teacher "records"
            requires `teacher_ids` and `teacher_logprobs` [A, B, T x K] (see
            `data.teacher.Alternatives`).

        Returns:
          Scalars: `loss` (z-loss included), `last_loss` (the loss at the last position of each
          sequence or, with `loss_mask`, at the last one that counts in each text), `grad_norm`
          (before clipping), `grad_norm_micro` and `grad_square_micro` (the mean norm and mean
          squared norm of the gradients of small batches; see `noise_batches`), `learning_rate`,
          `counted` (0 if no target counts in the loss, else 1), and `skipped` (1 if the update was
          skipped, else 0).  With an objective, `loss` and `last_loss` are its own loss, and
          its metrics follow, with `objective/` before their names.
        """
        multiple = self.config.position_multiple
        batch = check_batch(self.config, "train", sample, 3, multiple=multiple)
        if self.objective is not None or self.config.objective is not None:
            check_groups(batch, by_token=self.config.has_rollouts)
        if self.config.has_stored_teacher and TEACHER_KEYS[0] not in batch:
            raise InputError(
                f"train: the batch has no {TEACHER_KEYS[0]!r}, but teacher is records; give "
                "records of `completion-records --teacher-tokens`, or set teacher to null"
            )
        return self.run(Train(batch))

    def trace(self, folder: str | None) -> str:
        """Begin a trace of the devices' work with JAX's profiler, or end it.

        Waits for the work that has been dispatched.  Of the processes on a machine, the first one
        has a trace, which is written when it ends.

        Args:
          folder: the folder of the trace, which may be in a bucket; None to end the trace.

        Returns:
          Why the trace could not be written; "" if it could.
        """
        return self.run(Trace(folder))

    def close(self) -> None:
        """Wait until the last save has finished, and unlock the model folder."""
        raise NotImplementedError
