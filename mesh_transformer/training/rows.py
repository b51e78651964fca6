"""The metrics rows of training steps, and the counts of a run that they depend on."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from mesh_transformer.data.loader import describe_batch, epochs
from mesh_transformer.model import flops
from mesh_transformer.network import TrainableNetwork
from mesh_transformer.training.goodput import Ledger
from mesh_transformer.training.metrics import NoiseScale
from mesh_transformer.training.objectives import PREFIX
from mesh_transformer.util import DivergedError, InputError


class Step(NamedTuple):
    """A training step that was started; its results may not be ready yet.

    Attributes:
      number: the step's number, from 1.
      length: the number of tokens per sequence.
      metrics: the step's metrics, as `TrainableNetwork.train` returns them.
      before, after: the training set's positions before and after the step's batch.
    """

    number: int
    length: int
    metrics: dict[str, Any]
    before: dict[str, Any]
    after: dict[str, Any]


def full_batch(network: TrainableNetwork) -> int:
    """Return the number of sequences of an update, after the ramp of `batch_ramp_steps`."""
    return network.batch_size * network.config.gradient_accumulation_steps


def check_same_batch(network: TrainableNetwork, saved: dict[str, Any], folder: str) -> str:
    """Describe how the batches of a resumed run differ from those before; "" if they do not.

    Args:
      saved: what the checkpoint holds beside the network's state; see `MetricsRows.state`.
      folder: the model folder, for error messages.

    Raises:
      InputError: if they differ, but none of the keys that exist to choose them do.
    """
    batch, before = full_batch(network), saved.get("batch")
    if before in (None, batch):
        return ""
    config, old = network.config, saved.get("config", {})
    keys = ("per_replica_batch", "gradient_accumulation_steps")
    changes = [
        f"{key} is {getattr(config, key)}, was {old[key]}"
        for key in keys
        if key in old and getattr(config, key) != old[key]
    ]
    if changes:
        return f"{batch} sequences per update, was {before}: {', '.join(changes)}"
    replicas = config.replicas(network.dp) * config.gradient_accumulation_steps
    rows, rest = divmod(before, replicas)
    remedy = f"set per_replica_batch to {rows}" if not rest else f"change {' or '.join(keys)}"
    raise InputError(
        f"{folder}: its updates have {before} sequences, but on the mesh {network.dp}x"
        f"{config.cores_per_replica} (dp x mp) they would have {batch}; {remedy}, or resume on the "
        "mesh of before"
    )


class MetricsRows:
    """Makes the metrics rows of a run's steps, one after the other.

    Args:
      ledger: measures how the run spends its time.
      unsaved: what to say, after the reason why a run stops, about the steps that are not saved.
      report: prints a line for the user.
      saved: what `state` returned when the run that continues was saved; other entries are ignored.

    Attributes:
      unsaved: as above.
      peak: total peak FLOP/s of the devices; None if unknown.
    """

    def __init__(
        self,
        network: TrainableNetwork,
        ledger: Ledger,
        unsaved: str,
        report: Callable[[str], None],
        saved: dict[str, Any],
    ):
        self.config, self.peak = network.config, network.peak_flops
        self._network, self._ledger, self.unsaved, self._report = network, ledger, unsaved, report
        self._skipped = {"total": 0, "in_row": 0} | saved.get("skipped", {})  # numbers of updates
        earlier = sum(map(self._sequences, range(network.step))) * self.config.seq
        self._tokens = saved.get("tokens", earlier)  # that all updates so far have read
        self._noise = NoiseScale(self.config.noise_scale_alpha, *network.noise_batches)
        if "noise" in saved:
            self._noise.restore(saved["noise"])

    def state(self) -> dict[str, Any]:
        """Return the counts and averages up to the newest row, to be stored in a checkpoint."""
        return {
            "noise": self._noise.state(),
            "skipped": self._skipped,
            "tokens": self._tokens,
            "batch": full_batch(self._network),
        }

    def _sequences(self, step: int) -> int:
        """Return the number of sequences of the update after `step` others."""
        return self.config.microbatches(step) * self._network.batch_size

    def row(self, step: Step, values: dict[str, float], seconds: float) -> dict[str, float]:
        """Return a step's metrics row, without the metrics whose values are not finite.

        Args:
          values: the step's metrics, as numbers.
          seconds: the step's duration.

        Raises:
          DivergedError: if a loss or gradient norm is not finite and the config does not set
            `skip_nonfinite`, or if `max_skipped` updates in a row were skipped.
        """
        self._count_skipped(step, values)
        row: dict[str, float] = {"step": step.number}
        measured = ("loss", "last_loss", "grad_norm") if values["counted"] else ()
        for name in (*measured, "learning_rate"):
            if math.isfinite(values[name]):
                row[f"train/{name}"] = values[name]
        for name, value in values.items():
            if name.startswith(PREFIX) and math.isfinite(value):
                row[f"train/{name.removeprefix(PREFIX)}"] = value
        if self.config.skip_nonfinite or self.config.skip_spikes or self._skipped["total"]:
            row["train/skipped"] = self._skipped["total"]
        sequences = self._sequences(step.number - 1)
        self._tokens += sequences * step.length
        row |= {"train/sequences": sequences, "train/tokens": self._tokens}
        for name, count in epochs(self.config.train_set, step.after).items():
            row[f"train/epochs/{name}"] = count
        row["train/tokens_per_sec"] = sequences * step.length / seconds
        if self.peak is not None:
            row["train/mfu"] = flops.mfu(self.config, row["train/tokens_per_sec"], self.peak)
        row |= {name: value for name, value in values.items() if name.startswith("host_seconds/")}
        if values["counted"]:
            squares = values["grad_square_micro"], values["grad_norm"] ** 2
            row |= self._noise.update(*squares, sequences)
        return row | self._ledger.metrics(complete=step.number == self._network.step)

    def _count_skipped(self, step: Step, values: dict[str, float]) -> None:
        """Count and report the step if its update was skipped.

        Raises:
          DivergedError: if the run must stop because of this step (see `row`).
        """
        config = self.config
        is_finite = math.isfinite(values["loss"] + values["grad_norm"])
        if is_finite and not values["skipped"]:
            self._skipped = self._skipped | {"in_row": 0}
            return
        self._skipped = {name: count + 1 for name, count in self._skipped.items()}
        assert config.train_set is not None
        records = describe_batch(config.train_set, step.before, step.after)
        problem = f"loss is {values['loss']}, gradient norm {values['grad_norm']}"
        if not values["counted"]:
            problem = "no target of the batch counts in the loss"
        problem = f"step {step.number}: {problem}; its batch is {records}"
        can_continue = is_finite or config.skip_nonfinite
        if can_continue and self._skipped["in_row"] < config.max_skipped:
            self._report(f"{problem}; its update is skipped")
            return
        remedy = "lower lr, check the data, or set skip_nonfinite"
        if can_continue:
            count = self._skipped["in_row"]
            check = "lower lr, or check the data" if values["counted"] else "check the loss masks"
            remedy = f"{count} updates in a row were skipped; {check}"
        raise DivergedError(f"{problem}{self.unsaved}; {remedy}")
