"""`Rollouts`: a training set of answers that the network samples itself, with their rewards.

Array names end in their shape: P prompts of a rollout, G answers of a group; U updates, A
accumulation, B batch row, T position.
"""

import base64
import collections
import hashlib
import io
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from mesh_transformer.data.prompts import Prompt, read_prompts
from mesh_transformer.data.record_set import Row, random
from mesh_transformer.data.special_tokens import before_end, end_tokens
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.generation.finite import check_tokens_chosen
from mesh_transformer.generation.sampling_settings import sampler_settings
from mesh_transformer.generation.stream import MOST_STEPS
from mesh_transformer.network import TrainableNetwork
from mesh_transformer.training.metrics import MetricsLog
from mesh_transformer.training.objectives import PREFIX, Head
from mesh_transformer.training.rewards import Rewards
from mesh_transformer.util import InputError, bucket

NAME = "samples.jsonl"  # in the model folder: some answers of each rollout
SAMPLES = 8  # answers per rollout in it, one per prompt
SMALLEST_WIDTH = 16  # rows are padded to this times a power of two, so that few programs compile
RAREST = 3  # with `curriculum`, prompts are drawn at least 2**-3 times as often as others
LARGEST_STATE = 1 << 28  # bytes of a rollout that a checkpoint may hold


class StoppedRolloutError(Exception):
    """A signal has ended a rollout; a resumed run samples it again."""


class Answer(NamedTuple):
    """Sampled token ids, with the end token if there is one, and log p of each, in nats."""

    tokens: list[int]
    logprobs: list[float]


class Rollouts:
    """Batches of answers to prompts; the methods are those of `network.TrainSet`.

    A rollout has answers for `rollout_updates` updates, in groups with the same prompt, and is
    sampled with the network's parameters before the first of these updates: at temperature 1, so
    that the probabilities are the model's own.  The seeds depend only on the config and the
    rollout's number, so a resumed run samples the same answers.

    Args:
      prompts: what `data.prompts.read_prompts` reads.
      folder: the model folder, for `samples.jsonl`.

    Attributes:
      metrics: those of the newest rollout, by their names in a step's metrics.

    Raises:
      InputError: if the prompts, the reward function or the sizes cannot be used.
    """

    def __init__(self, network: TrainableNetwork, prompts: Any, folder: str, head: Head):
        config = network.config
        self._network, self._config, self._folder, self._head = network, config, folder, head
        self._shape = config.rollout_updates, config.gradient_accumulation_steps, network.batch_size
        self._groups, rest = divmod(int(np.prod(self._shape)), config.group_size)
        if rest or not network.alone:
            sizes = " x ".join(map(str, self._shape))
            raise InputError(
                f"objective grpo: a rollout has {sizes} answers (updates x microbatches x batch "
                f"rows), expected a multiple of group_size ({config.group_size})"
                if rest
                else "objective grpo: one process must lead the others; use --every-host"
            )
        if head.needs_reference and not (config.lora_rank and config.reference == "base"):
            raise InputError(
                "objective grpo: the reference is the base model under LoRA adapters, because "
                "another one would need memory beside the trained model; set lora_rank and leave "
                "reference base, or set beta to 0"
            )
        if not isinstance(prompts, str | Sequence):
            raise InputError("objective grpo: train_set is a mixture, expected one path of prompts")
        self._tokenizer: Any = load_tokenizer(config.tokenizer)
        self._ends = end_tokens(self._tokenizer, config)
        longest = config.seq + 1 - config.answer_tokens
        self._prompts = read_prompts(prompts, self._tokenizer, config.chat_template, longest)
        texts = repr([prompt.tokens for prompt in self._prompts])
        self._digest = hashlib.sha256(texts.encode()).hexdigest()
        assert config.reward is not None
        self._rewards = Rewards(config.reward, config.reward_seconds, config.reward_workers)
        self._log: MetricsLog | None = None
        self.restore(None)

    def get_samples(self) -> Row:
        """Return the batch of the next update, arrays [A, B, T]; sample a rollout if need be.

        Raises:
          InputError: if the reward of an answer fails and the config says "stop".
          NonFiniteError: if the model's logits are not finite.
          StoppedRolloutError: if a signal arrives.
        """
        if self._update == self._config.rollout_updates:
            self._sample()
        batch = {key: array[self._update] for key, array in self._arrays.items()}
        self._update += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch as JSON values, and the answers still to use."""
        return {
            "prompts": self._digest,
            "rollout": self._rollout,
            "update": self._update,
            "drawn": self._drawn,
            "equal": {str(at): int(n) for at, n in enumerate(self._equal) if n},
            "metrics": self.metrics,
            "arrays": self._encoded if self._update < self._config.rollout_updates else None,
        }

    def restore(self, state: dict[str, Any] | None, batches: int = 0) -> None:
        """Continue from a result of `state`; None: with the first rollout.

        Raises:
          InputError: if the position is not one in these prompts.
        """
        if state is not None and state.get("prompts") != self._digest:
            raise InputError(
                "the checkpoint's position is not one in these prompts; give the prompts of "
                "before, or another model folder"
            )
        state = state or {"arrays": None, "rollout": 0, "drawn": 0, "equal": {}, "metrics": {}}
        self._rollout, self._drawn, self.metrics = (
            state[key] for key in ("rollout", "drawn", "metrics")
        )
        self._equal = np.zeros(len(self._prompts), np.int64)  # groups in a row, of each prompt
        for at, count in state["equal"].items():
            self._equal[int(at)] = count
        self._encoded, self._update = state["arrays"], self._config.rollout_updates
        if self._encoded is not None:
            with np.load(io.BytesIO(base64.b64decode(self._encoded))) as arrays:
                self._arrays = dict(arrays)
            self._update = state["update"]
        if self._log is not None:
            self._log.close()
            self._log = None

    def close(self) -> None:
        """End the processes of the reward function."""
        self._rewards.close()
        if self._log is not None:
            self._log.upload()
            self._log.close()

    def _sample(self) -> None:
        """Sample a rollout, and compute what its updates need."""
        config, number = self._config, self._rollout
        chosen_P = self._choose(self._groups)
        prompts = [self._prompts[at] for at in np.repeat(chosen_P, config.group_size)]
        seeds = random(config.seed, "answers", number).integers(2**32, size=len(prompts))
        answers = self._answers([prompt.tokens for prompt in prompts], seeds)
        texts = [self._text(answer.tokens) for answer in answers]
        calls = [(p.text, text, p.row) for p, text in zip(prompts, texts, strict=True)]
        rewards = self._rewarded(prompts, self._rewards(calls))
        advantages, equal_P = group_advantages(
            rewards.reshape(-1, config.group_size), scale=config.scale_advantages
        )
        arrays = self._batches(prompts, answers, np.where(np.isnan(rewards), 0, 1), advantages)
        lengths = [len(answer.tokens) for answer in answers]
        uncut = [answer.tokens[-1] in self._ends for answer in answers]
        has_reward = np.isfinite(rewards)
        metrics = {
            "reward": rewards[has_reward].mean() if has_reward.any() else np.nan,
            "equal_groups": equal_P.mean(),
            "answer_tokens": np.mean(lengths),
            "answers_cut": 1 - np.mean(uncut),
            "failed_rewards": 1 - has_reward.mean(),
        }
        self._write(prompts, texts, rewards)
        self.metrics = {PREFIX + name: float(x) for name, x in metrics.items() if np.isfinite(x)}
        self._equal[chosen_P] = np.where(equal_P, self._equal[chosen_P] + 1, 0)
        self._rollout, self._drawn, self._update = number + 1, self._drawn + len(chosen_P), 0
        self._arrays, self._encoded = arrays, None
        if config.rollout_updates > 1:
            if sum(array.nbytes for array in arrays.values()) > LARGEST_STATE:
                raise InputError(
                    f"objective grpo: a rollout has more than {LARGEST_STATE >> 20} MiB, which its "
                    "checkpoints would hold; lower rollout_updates"
                )
            content = io.BytesIO()
            np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
            self._encoded = base64.b64encode(content.getvalue()).decode()

    def _choose(self, count: int) -> np.ndarray:
        """Return the indices of the prompts of the next rollout."""
        size, seed = len(self._prompts), self._config.seed
        if self._config.curriculum:
            weights = 0.5 ** np.minimum(self._equal, RAREST)
            rng = random(seed, "prompts", self._rollout)
            return rng.choice(size, count, replace=count > size, p=weights / weights.sum())
        epochs = range(self._drawn // size, (self._drawn + count) // size + 1)
        orders = [random(seed, "prompts", epoch).permutation(size) for epoch in epochs]
        return np.concatenate(orders)[self._drawn % size :][:count]

    def _answers(self, prompts: Sequence[list[int]], seeds: np.ndarray) -> list[Answer]:
        """Sample an answer to each prompt, in rows that are refilled as answers end."""
        network, config, replicas = self._network, self._config, len(self._network.own_replicas)
        rows = min(config.rollout_rows or len(prompts), len(prompts))
        batch = network.batch(-(-rows // replicas) * replicas)
        answers = [Answer([], []) for _ in prompts]
        waiting, free = collections.deque(range(len(prompts))), list(range(batch.rows))
        running: dict[int, Answer] = {}

        def add(row: int, tokens_M: np.ndarray, logprobs_M: np.ndarray) -> None:
            answer, left = running[row], config.answer_tokens - len(running[row].tokens)
            tokens = tokens_M[:left].tolist()
            kept = tokens[: len(before_end(tokens, self._ends)) + 1]
            answer.tokens.extend(kept)
            answer.logprobs.extend(logprobs_M[: len(kept)].tolist())
            if kept[-1] in self._ends or len(kept) == left:
                batch.release([row])
                free.append(row)
                del running[row]

        while waiting or running:
            if self._network.signals:
                raise StoppedRolloutError
            if new := [
                (free.pop(), waiting.popleft()) for _ in range(min(len(free), len(waiting)))
            ]:
                places, at = [row for row, _ in new], [index for _, index in new]
                running |= {row: answers[index] for row, index in new}
                settings = sampler_settings({"top_p": 1.0, "seed": seeds[at]}, len(new))
                texts = [np.array(prompts[index], np.uint32) for index in at]
                chosen = batch.insert(places, texts, config.answer_tokens, settings, alternatives=0)
                check_tokens_chosen(chosen.token)
                for place, row in enumerate(places):
                    add(row, chosen.token[place : place + 1], chosen.logprob[place : place + 1])
            if left := int(batch.left.max()):
                chosen = batch.decode(min(MOST_STEPS, left), alternatives=0)
                check_tokens_chosen(chosen.token[list(running)])
                for row in list(running):
                    add(row, chosen.token[row], chosen.logprob[row])
        return answers

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(
            before_end(tokens, self._ends),
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )

    def _rewarded(self, prompts: list[Prompt], outcomes: list[float | str]) -> np.ndarray:
        """Return the rewards as numbers, NaN for those that failed, which are reported."""
        failed = [at for at, outcome in enumerate(outcomes) if isinstance(outcome, str)]
        if failed:
            line = (
                f"reward {self._config.reward}: {prompts[failed[0]].where}: {outcomes[failed[0]]}"
            )
            if self._config.on_reward_failure == "stop":
                raise InputError(f"{line}; correct it, or set on_reward_failure to continue")
            count = f"rollout {self._rollout + 1}: {len(failed)} of {len(outcomes)} answers have no"
            tqdm.write(f"{count} reward and are left out; {line}", file=sys.stderr)
        return np.array([np.nan if isinstance(x, str) else x for x in outcomes], np.float64)

    def _batches(
        self,
        prompts: list[Prompt],
        answers: list[Answer],
        counts: np.ndarray,
        advantages: np.ndarray,
    ) -> Row:
        """Return the arrays [U, A, B, T] of a rollout, with one answer per row."""
        sizes = [len(p.tokens) + len(a.tokens) - 1 for p, a in zip(prompts, answers, strict=True)]
        shape = len(prompts), bucket(max(sizes), SMALLEST_WIDTH, self._config.seq)
        integers = {key: np.zeros(shape, np.uint32) for key in ("obs", "target", "loss_mask")}
        arrays = integers | {key: np.zeros(shape, np.float32) for key in ("advantage", "sampled")}
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            tokens = [*prompt.tokens, *answer.tokens]
            arrays["obs"][row, : sizes[row]] = tokens[:-1]
            arrays["target"][row, : sizes[row]] = tokens[1:]
            place = slice(len(prompt.tokens) - 1, sizes[row])
            arrays["loss_mask"][row, place] = counts[row]
            arrays["advantage"][row, place] = advantages.ravel()[row]
            arrays["sampled"][row, place] = answer.logprobs
        if self._config.rollout_updates > 1:
            arrays["old"] = self._logprobs(arrays, base=False)
        if self._head.needs_reference:
            arrays["reference"] = self._logprobs(arrays, base=True)
        return {key: x.reshape(*self._shape, -1) for key, x in arrays.items()}

    def _logprobs(self, arrays: Row, *, base: bool) -> np.ndarray:
        """Return the log-probabilities of the targets, f32 [rows, T]."""
        rows, parts = self._network.batch_size, []
        for start in range(0, len(arrays["obs"]), rows):
            part = {key: arrays[key][start : start + rows] for key in ("obs", "target")}
            parts.append(self._network.eval(part, base=base)["all_loss"])
        return -np.concatenate([np.asarray(part, np.float32) for part in parts])

    def _write(self, prompts: list[Prompt], texts: list[str], rewards: np.ndarray) -> None:
        """Append the first answer to some prompts to `samples.jsonl`."""
        step, size = self._network.step, self._config.group_size
        self._log = self._log or MetricsLog(self._folder, step, name=NAME)
        for at in range(0, min(len(texts), SAMPLES * size), size):
            reward = None if np.isnan(rewards[at]) else rewards[at]
            values = {"prompt": prompts[at].text, "answer": texts[at], "reward": reward}
            self._log.write({"step": step + 1} | values)
        self._log.upload()


def group_advantages(reward_PG: np.ndarray, *, scale: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the advantages [P, G], and whether the rewards of each group are equal [P].

    An advantage is the difference from the group's mean, not divided by its standard deviation,
    which would weight easy and hard prompts more (Liu et al. 2025), unless `scale` is true.
    Rewards that are NaN do not count; their advantage is 0.
    """
    has_PG = np.isfinite(reward_PG)
    count_P1 = np.maximum(has_PG.sum(axis=1, keepdims=True), 1)
    mean_P1 = np.where(has_PG, reward_PG, 0).sum(axis=1, keepdims=True) / count_P1
    own_PG = np.where(has_PG, reward_PG, np.where(has_PG.any(axis=1, keepdims=True), np.nan, 0))
    spread_P = np.nanmax(own_PG, axis=1) - np.nanmin(own_PG, axis=1)
    gap_PG = np.where(has_PG & (spread_P > 0)[:, None], reward_PG - mean_P1, 0)
    if scale:
        squares_P1 = np.square(gap_PG).sum(axis=1, keepdims=True)
        gap_PG = gap_PG / (np.sqrt(squares_P1 / np.maximum(count_P1 - 1, 1)) + 1e-4)
    return gap_PG, spread_P == 0
