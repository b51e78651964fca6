"""Networks, independent of where they run: their methods, and the calls that these make.

A method of `Network` checks its arguments and runs a call, such as `Score`.  Four classes run
calls: `CausalTransformer` on the devices of this process, `EveryHost` on the devices of several
processes that all make the same calls, `TPUCluster` on the hosts of a pod, and `RestartingCluster`
on a pod whose hosts are all restarted when one of them fails.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike

from mesh_transformer.calls import ROWS, Call, Result
from mesh_transformer.config import Config
from mesh_transformer.data.batches import check_batch, check_tokens
from mesh_transformer.generation.batch import BadWeights, Batch
from mesh_transformer.generation.decode import Chosen
from mesh_transformer.generation.pool import Pool
from mesh_transformer.generation.prompts import check_pooled


@dataclass(frozen=True, eq=False)
class Eval(Call[dict[str, Any]]):
    """See `Network.eval`."""

    batch: dict[str, np.ndarray] = field(metadata=ROWS)
    returns_rows: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class Score(Call[Chosen]):
    """See `Network.score`."""

    tokens: np.ndarray = field(metadata=ROWS)
    alternatives: int
    beginning: np.ndarray | None
    adapter: int
    returns_rows: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class Embed(Call[np.ndarray]):
    """See `Network.embed`."""

    tokens: np.ndarray = field(metadata=ROWS)
    lengths: np.ndarray = field(metadata=ROWS)
    pooling: str
    adapter: int
    returns_rows: ClassVar[bool] = True


class Network:
    """A model that can generate text and score it.

    Attributes:
      config: the config, as a `Config`.
      dp: number of data-parallel replicas; each holds the same number of batch rows.
      batch_size: number of sequences per microbatch, summed over all replicas.
    """

    config: Config
    dp: int
    batch_size: int

    def run(self, call: Call[Result]) -> Result:
        """Run a call, and return its result."""
        raise NotImplementedError

    @property
    def adapters(self) -> int:
        """Number of LoRA adapters that each text may choose from."""
        raise NotImplementedError

    @property
    def own_replicas(self) -> int:
        """Number of replicas whose batch rows the caller passes in and gets back."""
        return self.dp

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
            self.own_replicas,
            adapters=self.adapters,
            pool=pool,
            guesses=guesses,
        )

    def bad_weights(self) -> str | None:
        """Name the weights that are NaN or infinite; "" if there are none."""
        return self.run(BadWeights())

    def eval(self, sample: dict[str, np.ndarray]) -> dict[str, Any]:
        """Compute the losses of predicting `target` from `obs`, without z-loss.

        Args:
          sample: a dict of token ids `obs` and `target` [B, T] with any B; optionally `segment_ids`
            [B, T], as for `train`.  The keys `loss_mask` and `ctx_length` are not used.

        Returns:
          `all_loss` (in nats) and `correct` (whether `target` was the most likely token), both
          [B, T]; `loss` (the mean of `all_loss` over T) and `last_loss` (`all_loss` at the last
          position), both [B].
        """
        batch = check_batch(self.config, "eval", sample, 2, ignored="ctx_length")
        batch.pop("loss_mask", None)
        return self.run(Eval(batch))

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
    notice: str
    noise_batches: tuple[int, int]
    peak_flops: float | None

    def init(self) -> None:
        """See `CausalTransformer.init`."""
        raise NotImplementedError

    def open_train_set(self) -> TrainSet:
        """See `CausalTransformer.open_train_set`."""
        raise NotImplementedError

    def train(self, sample: dict[str, np.ndarray]) -> dict[str, Any]:
        """See `CausalTransformer.train`."""
        raise NotImplementedError

    def claim(self, folder: str) -> None:
        """See `CausalTransformer.claim`."""
        raise NotImplementedError

    @property
    def save_failed(self) -> bool:
        """See `CausalTransformer.save_failed`."""
        raise NotImplementedError

    def save(self, folder: str, aux: dict[str, Any] | None = None) -> None:
        """See `CausalTransformer.save`."""
        raise NotImplementedError

    def wait(self) -> None:
        """See `CausalTransformer.wait`."""
        raise NotImplementedError

    def larger_mesh(self) -> str:
        """See `TPUCluster.larger_mesh`."""
        raise NotImplementedError

    def keep(self, aux: dict[str, Any]) -> str:
        """See `TPUCluster.keep`."""
        raise NotImplementedError

    def restore(self, folder: str, base: str | None = None) -> dict[str, Any] | None:
        """See `CausalTransformer.restore`."""
        raise NotImplementedError

    def load(self, path: str, *, fresh_opt: bool = False, only_params: bool = False) -> None:
        """See `CausalTransformer.load`."""
        raise NotImplementedError

    def close(self) -> None:
        """See `CausalTransformer.close`."""
        raise NotImplementedError
