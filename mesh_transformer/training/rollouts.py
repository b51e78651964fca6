"""`Rollouts`: a training set of answers that the network samples itself, with their rewards.

Array names end in their shape: P prompts of a rollout, G answers of a group, T position, M tokens
of a call.
"""

import base64
import collections
import hashlib
import io
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from mesh_transformer.data.prompts import Prompt, read_prompts
from mesh_transformer.data.record_set import Row, random
from mesh_transformer.data.special_tokens import before_end, end_tokens
from mesh_transformer.data.tokenizer import load_tokenizer
from mesh_transformer.evaluation.rewards import Rewards
from mesh_transformer.generation.finite import check_tokens_chosen
from mesh_transformer.generation.sampling_settings import sampler_settings
from mesh_transformer.generation.stream import MOST_STEPS
from mesh_transformer.network import TrainableNetwork
from mesh_transformer.training.metrics import MetricsLog
from mesh_transformer.training.objectives import PREFIX, Head
from mesh_transformer.util import InputError, InterruptedWorkError, bucket

NAME = "samples.jsonl"  # in the model folder: some answers of each rollout
SAMPLES = 8  # answers per rollout in it, one per prompt
SMALLEST_WIDTH = 16  # rows are padded to this times a power of two, so that few programs compile
RAREST = 3  # with `curriculum`, each prompt is drawn at least 2**-3 times as often as others


class Answer(NamedTuple):
    """An answer: its token ids, with the end token if there is one, and log p of each, in nats."""

    prompt: Prompt
    tokens: list[int]
    logprobs: list[float]


class Rollouts:
    """Batches of answers to prompts; the methods are those of `network.TrainSet`.

    A rollout has the answers for `rollout_updates` updates, in groups with the same prompt.  It is
    sampled with the parameters before the first of these updates, at temperature 1, so that the
    probabilities are the model's own.  What is sampled depends only on these, the config and the
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
        if rest:
            sizes = " x ".join(map(str, self._shape))
            raise InputError(
                f"objective grpo: a rollout has {sizes} answers (updates x microbatches x batch "
                f"rows), expected a multiple of group_size ({config.group_size})"
            )
        # Dropout and quantization would change the probabilities of one side only.
        excluded = {"batch_ramp_steps": config.batch_ramp_steps, "dropout": config.drops}
        excluded |= {"weight_bits": config.weight_bits, "int8_cache": config.int8_cache}
        excluded |= {"int8_matmuls": config.int8_matmuls}
        if wrong := [f"{key} is {value}" for key, value in excluded.items() if value]:
            raise InputError(f"objective is grpo, but {wrong[0]}; unset it")
        if not network.alone:
            raise InputError(
                "objective grpo: several processes need a leading one; use --every-host"
            )
        if head.needs_reference and not (config.lora_rank and config.reference == "base"):
            raise InputError(
                "objective grpo: beta needs LoRA adapters, whose base model is the reference; set "
                "lora_rank and reference to base, or set beta to 0"
            )
        if not isinstance(prompts, str | Sequence):
            kind = (
                "a mixture" if isinstance(prompts, Mapping) else f"of type {type(prompts).__name__}"
            )
            raise InputError(
                f"objective grpo: the prompts are {kind}, expected one path, or a list of rows"
            )
        self._tokenizer: Any = load_tokenizer(config.tokenizer)
        self._ends = end_tokens(self._tokenizer, config)
        longest = config.seq + 1 - config.answer_tokens
        self._prompts = read_prompts(prompts, self._tokenizer, config.chat_template, longest)
        texts = repr([prompt.tokens for prompt in self._prompts])
        self._digest = hashlib.sha256(texts.encode()).hexdigest()
        self._log: MetricsLog | None = None
        self.restore(None)
        assert config.reward is not None
        self._rewards = Rewards(config.reward, config.reward_seconds, config.reward_workers)

    @property
    def is_used(self) -> bool:
        """Whether the next batch needs a new rollout, and so the parameters of the last update."""
        return self._update == self._config.rollout_updates

    def get_samples(self) -> Row:
        """Return the batch of the next update, arrays [A, B, T]; sample a rollout if need be.

        Raises:
          InputError: if the reward of an answer fails and `on_reward_failure` is "stop".
          NonFiniteError: if the model's logits are not finite.
          InterruptedWorkError: if a signal has arrived.
        """
        if self.is_used:
            self._sample()
        batch = {key: array[self._update] for key, array in self._arrays.items()}
        self._update += 1
        return batch

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch, and the rollout if it has further updates."""
        own = {"rollout": self._rollout, "update": self._update, "drawn": self._drawn}
        own |= {"prompts": self._digest, "metrics": self.metrics, "equal": self._equal.tolist()}
        return own | {"arrays": None if self.is_used else self._encoded}

    def restore(self, state: dict[str, Any] | None, batches: int = 0) -> None:
        """Continue from a result of `state`; None: from the rollout after `batches` updates.

        A rollout that was sampled for other sizes, or without a reference that is needed now, is
        not continued, but followed by the next one.

        Raises:
          InputError: if the position is not one in these prompts.
        """
        if state is not None and state.get("prompts") != self._digest:
            raise InputError(
                "the checkpoint was trained on other prompts; give those prompts, or another model "
                "folder"
            )
        rollout = -(-batches // self._config.rollout_updates)
        state = state or {"arrays": None, "equal": [0] * len(self._prompts), "metrics": {}}
        self._rollout = state.get("rollout", rollout)
        self._drawn = state.get("drawn", rollout * self._groups)
        self.metrics, self._encoded = state["metrics"], state["arrays"]
        self._equal = np.array(state["equal"])  # the last groups of each prompt with equal rewards
        self._update = self._config.rollout_updates
        if self._encoded is not None:
            with np.load(io.BytesIO(base64.b64decode(self._encoded))) as arrays:
                self._arrays = dict(arrays)
            has_reference = "reference" in self._arrays or not self._head.needs_reference
            if self._arrays["obs"].shape[:-1] == self._shape and has_reference:
                self._update = state["update"]

    def close(self) -> None:
        """End the processes of the reward function."""
        self._rewards.close()
        if self._log is not None:
            self._log.close()

    def _sample(self) -> None:
        """Sample a rollout, and compute what its updates need."""
        config = self._config
        chosen_P = self._choose(self._groups)
        answers = self._answers(
            [self._prompts[at] for at in np.repeat(chosen_P, config.group_size)]
        )
        texts = [self._text(answer.tokens) for answer in answers]
        rewards = self._rewarded(answers, texts)
        advantages_PG, equal_P = group_advantages(
            rewards.reshape(-1, config.group_size), scale=config.scale_advantages
        )
        arrays = self._batches(answers, np.isfinite(rewards), advantages_PG.ravel())
        self._write(answers, texts, rewards)
        metrics = {
            "reward": np.nanmean(rewards) if np.isfinite(rewards).any() else np.nan,
            "equal_groups": equal_P.mean(),
            "answer_tokens": np.mean([len(answer.tokens) for answer in answers]),
            "answers_cut": np.mean([answer.tokens[-1] not in self._ends for answer in answers]),
            "failed_rewards": np.isnan(rewards).mean(),
        }
        self.metrics = {PREFIX + name: float(x) for name, x in metrics.items() if np.isfinite(x)}
        self._equal[chosen_P] = np.where(equal_P, self._equal[chosen_P] + 1, 0)
        self._rollout, self._drawn, self._update = self._rollout + 1, self._drawn + self._groups, 0
        self._arrays, content = arrays, io.BytesIO()
        if config.rollout_updates > 1:  # a checkpoint may be between them
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

    def _answers(self, prompts: list[Prompt]) -> list[Answer]:
        """Sample an answer to each prompt, in rows that are refilled as answers end."""
        config, replicas = self._config, len(self._network.own_replicas)
        seeds = random(config.seed, "answers", self._rollout).integers(2**32, size=len(prompts))
        rows = min(config.rollout_rows or len(prompts), len(prompts))
        batch = self._network.batch(-(-rows // replicas) * replicas)
        answers = [Answer(prompt, [], []) for prompt in prompts]
        waiting, free = collections.deque(range(len(prompts))), list(range(batch.rows))
        running: dict[int, Answer] = {}

        def add(row: int, tokens_M: np.ndarray, logprobs_M: np.ndarray) -> None:
            check_tokens_chosen(tokens_M)
            answer, tokens = running[row], tokens_M.tolist()
            left = config.answer_tokens - len(answer.tokens)
            kept = tokens[: min(len(before_end(tokens, self._ends)) + 1, left)]
            answer.tokens.extend(kept)
            answer.logprobs.extend(logprobs_M[: len(kept)].tolist())
            if kept[-1] in self._ends or len(kept) == left:
                batch.release([row])
                free.append(row)
                del running[row]

        while waiting or running:
            self._check_signals()
            if count := min(len(free), len(waiting)):
                new = {free.pop(): waiting.popleft() for _ in range(count)}
                running |= {row: answers[at] for row, at in new.items()}
                settings = sampler_settings({"top_p": 1.0, "seed": seeds[[*new.values()]]}, count)
                texts = [np.array(prompts[at].tokens, np.uint32) for at in new.values()]
                chosen = batch.insert([*new], texts, config.answer_tokens, settings, alternatives=0)
                for row, *of_row in zip(new, chosen.token, chosen.logprob, strict=True):
                    add(row, *map(np.atleast_1d, of_row))
            if left := int(batch.left.max()):
                chosen = batch.decode(min(MOST_STEPS, left), alternatives=0)
                for row in list(running):
                    add(row, chosen.token[row], chosen.logprob[row])
        return answers

    def _check_signals(self) -> None:
        if self._network.signals:
            raise InterruptedWorkError

    def _text(self, tokens: list[int]) -> str:
        own = before_end(tokens, self._ends)
        return self._tokenizer.decode(
            own, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _rewarded(self, answers: list[Answer], texts: list[str]) -> np.ndarray:
        """Return the rewards, f64, with NaN for those that failed, which are reported."""
        prompts = [answer.prompt for answer in answers]
        calls = [(p.text, x, p.row) for p, x in zip(prompts, texts, strict=True)]
        outcomes = self._rewards(calls, lambda: bool(self._network.signals))
        self._check_signals()
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

    def _batches(self, answers: list[Answer], counts: np.ndarray, advantages: np.ndarray) -> Row:
        """Return the arrays of a rollout's updates, [updates, A, B, T], with an answer per row."""
        ends = [len(answer.prompt.tokens) + len(answer.tokens) - 1 for answer in answers]
        multiple = self._config.position_multiple
        width = -(-bucket(max(ends), SMALLEST_WIDTH, self._config.seq) // multiple) * multiple
        shape = len(answers), width
        types = dict.fromkeys(("obs", "target"), np.uint32) | {"loss_mask": np.uint8}
        types |= dict.fromkeys(("advantage", "sampled"), np.float32)
        arrays: Row = {key: np.zeros(shape, dtype) for key, dtype in types.items()}
        for row, (answer, end) in enumerate(zip(answers, ends, strict=True)):
            tokens = [*answer.prompt.tokens, *answer.tokens]
            arrays["obs"][row, :end], arrays["target"][row, :end] = tokens[:-1], tokens[1:]
            place = slice(end - len(answer.tokens), end)
            arrays["loss_mask"][row, place] = counts[row]
            arrays["advantage"][row, place] = advantages[row]
            arrays["sampled"][row, place] = answer.logprobs
        if self._config.rollout_updates > 1:
            arrays["old"] = self._logprobs(arrays, base=False)
        if self._head.needs_reference:
            arrays["reference"] = self._logprobs(arrays, base=True)
        return {key: array.reshape(*self._shape, -1) for key, array in arrays.items()}

    def _logprobs(self, arrays: Row, *, base: bool) -> np.ndarray:
        """Return the log-probabilities of the targets, f32 [rows, T]."""
        rows, parts = self._network.batch_size, []
        for start in range(0, len(arrays["obs"]), rows):
            self._check_signals()
            part = {key: arrays[key][start : start + rows] for key in ("obs", "target")}
            parts.append(self._network.eval(part, base=base)["all_loss"])
        return -np.concatenate([np.asarray(part, np.float32) for part in parts])

    def _write(self, answers: list[Answer], texts: list[str], rewards: np.ndarray) -> None:
        """Append the first answer to some prompts to `samples.jsonl`."""
        step, size = self._network.step, self._config.group_size
        self._log = self._log or MetricsLog(self._folder, step, name=NAME)
        for at in range(0, min(len(texts), SAMPLES * size), size):
            reward = None if np.isnan(rewards[at]) else rewards[at]
            own = {"prompt": answers[at].prompt.text, "answer": texts[at], "reward": reward}
            self._log.write({"step": step + 1} | own)
        self._log.upload()


def group_advantages(reward_PG: np.ndarray, *, scale: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the advantages [P, G], and whether the rewards of each group are equal [P].

    An advantage is the difference from the group's mean.  It is divided by their standard deviation
    only if `scale` is true, as this gives easy and hard prompts more weight (Liu et al. 2025).
    Rewards that are NaN do not count; their advantage is 0.
    """
    advantage_PG, equal_P = np.zeros(reward_PG.shape), np.ones(len(reward_PG), bool)
    for row, reward_G in enumerate(reward_PG):
        has_G = np.isfinite(reward_G)
        own = reward_G[has_G]
        if len(set(own)) > 1:
            equal_P[row] = False
            spread = own.std(ddof=1) + 1e-4 if scale else 1.0
            advantage_PG[row, has_G] = (own - own.mean()) / spread
    return advantage_PG, equal_P
