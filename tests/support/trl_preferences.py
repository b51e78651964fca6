"""Makes tests/data/preferences.json: losses and gradients of TRL's preference and GRPO trainers.

    pip install trl==1.16.0
    python -m tests.support.trl_preferences

The trainers' own methods compute the losses, from log-probabilities of random texts and, with DPO,
from those of a tiny Llama with random weights.  Only what they need of a trainer is there.
"""

import collections
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

PATH = Path(__file__).parents[1] / "data" / "preferences.json"
PAIRS, POSITIONS = 5, 9
BETA, SIMPO_BETA, MARGIN, LABEL_WEIGHTS = 0.3, 1.7, 0.6, (1.2, 0.7)
CLIP_LOW, CLIP_HIGH, CAP, DIVISOR = 0.15, 0.25, 1.3, 12
LLAMA = {"vocab_size": 17, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
LLAMA |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}


def texts(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities [count, POSITIONS] and masks of random completions."""
    values = -rng.exponential(0.8, (count, POSITIONS)).astype(np.float32)
    starts = rng.integers(0, 4, (count, 1))
    ends = rng.integers(5, POSITIONS + 1, (count, 1))
    positions = np.arange(POSITIONS)
    return values, ((positions >= starts) & (positions < ends)).astype(np.int64)


def llama_weights(shapes: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the weights of the tiny model, by their names in Hugging Face's format."""
    rng = np.random.default_rng(5)
    return {name: rng.normal(0, 0.5, shapes[name]).astype(np.float32) for name in sorted(shapes)}


def llama_batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens [2 PAIRS, POSITIONS + 1], their masks, and reference sums [2 PAIRS].

    The first half of the rows is chosen, the second rejected.
    """
    rng = np.random.default_rng(6)
    _, mask = texts(rng, 2 * PAIRS)
    tokens = rng.integers(0, LLAMA["vocab_size"], (2 * PAIRS, POSITIONS + 1))
    return tokens, mask, rng.normal(-12, 2, 2 * PAIRS).astype(np.float32)


def rollout(logps: np.ndarray) -> dict[str, np.ndarray]:
    """Return advantages and the log-probabilities that go with those of an update, like `logps`."""
    rng = np.random.default_rng(8)
    near = {name: rng.normal(0, 0.3, logps.shape) for name in ("old", "sampled", "reference")}
    values = {name: (logps + noise).astype(np.float32) for name, noise in near.items()}
    return values | {"advantage": rng.normal(0, 1, len(logps)).astype(np.float32)}


def make() -> dict[str, Any]:
    import torch
    import transformers
    from trl import DPOTrainer, GRPOTrainer, KTOTrainer  # type: ignore
    from trl.experimental.cpo import CPOTrainer  # type: ignore
    from trl.experimental.orpo import ORPOTrainer  # type: ignore

    dpo_loss, kto_loss = DPOTrainer._compute_loss, KTOTrainer._compute_loss
    grpo_loss = GRPOTrainer._compute_loss
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)

    def trainer(**values: Any) -> Any:
        metrics: Any = {"train": collections.defaultdict(list)}
        common = {"accelerator": accelerator, "model": SimpleNamespace(training=True)}
        common |= {"aux_loss_enabled": False, "ld_alpha": None, "precompute_ref_logps": True}
        common |= {"f_divergence_type": "reverse_kl", "use_weighting": False, "_metrics": metrics}
        common |= {"_total_train_tokens": 0, "_tp_size": 1, "loss_weights": [1.0], "beta": BETA}
        return SimpleNamespace(**common | values)

    def outputs(values: Any) -> Any:
        """Return what the trainers expect of a model, for its log-probabilities."""
        zeros = torch.zeros_like(values)
        same = {"entropy": zeros, "mean_logits": zeros, "is_top1": zeros.bool()}
        return SimpleNamespace(log_probs=values, **same)

    def padded(mask: np.ndarray) -> Any:
        """Return a completion mask, with the first token, which has no log-probability."""
        return torch.tensor(np.pad(mask, ((0, 0), (1, 0))))

    rng = np.random.default_rng(4)
    values, mask = texts(rng, 2 * PAIRS)
    tokens = torch.zeros((2 * PAIRS, POSITIONS + 1), dtype=torch.int64)
    reference = ((values + rng.normal(0, 0.4, values.shape)) * mask).sum(1).astype(np.float32)
    result: dict[str, Any] = {
        "sums": (values * mask).sum(1).tolist(),
        "counts": mask.sum(1).tolist(),
        "references": reference.tolist(),
    }

    def gradient(loss: Any, leaf: Any) -> dict[str, Any]:
        loss.backward()
        # Of the sums: each counted position has the same gradient.
        at = [int(np.flatnonzero(row)[0]) for row in mask]
        grads = leaf.grad if leaf.ndim == 1 else leaf.grad[range(len(at)), at]
        return {"loss": loss.item(), "gradient": grads.tolist()}

    for name, kind in (("dpo", "sigmoid"), ("ipo", "ipo")):
        leaf = torch.tensor(values, requires_grad=True)
        inputs = {"completion_mask": padded(mask), "input_ids": tokens}
        inputs["attention_mask"] = torch.ones_like(tokens)
        halves = torch.tensor(reference).chunk(2)
        inputs |= dict(zip(("ref_chosen_logps", "ref_rejected_logps"), halves, strict=True))
        model = functools.partial(lambda leaf, **_: outputs(leaf * torch.tensor(mask)), leaf)
        loss = dpo_loss(trainer(loss_types=[kind]), model, inputs, False)
        result[name] = gradient(loss, leaf)

    means = (values * mask).sum(1) / mask.sum(1)
    for name in ("orpo", "simpo"):
        leaf = torch.tensor(means.astype(np.float32), requires_grad=True)
        if name == "orpo":
            halves = leaf.chunk(2)
            losses, *_ = ORPOTrainer.odds_ratio_loss(trainer(), *halves)
            loss = -halves[0].mean() - losses.mean()
        else:
            own = {
                "alpha": 0.0,
                "loss_type": "simpo",
                "simpo_gamma": MARGIN,
                "label_smoothing": 0.0,
            }
            own["beta"] = SIMPO_BETA
            loss = CPOTrainer.cpo_loss(trainer(**own), *leaf.chunk(2))[0].mean()
        result[name] = gradient(loss, leaf)
        result[name]["gradient"] = (np.array(result[name]["gradient"]) / mask.sum(1)).tolist()

    labels = torch.tensor([True] * PAIRS + [False] * PAIRS)
    other, other_mask = texts(rng, 2 * PAIRS)
    other_sums = (other * other_mask).sum(1).astype(np.float32)
    other_references = other_sums - rng.normal(0.3, 0.4, len(other_sums)).astype(np.float32)
    leaf = torch.tensor(values, requires_grad=True)
    own = {"calculate_KL": True, "loss_type": "kto"}
    own |= dict(zip(("desirable_weight", "undesirable_weight"), LABEL_WEIGHTS, strict=True))
    own["_compute_kl_logps"] = lambda *_: torch.tensor(other_sums)
    inputs = {"label": labels, "completion_mask": padded(mask), "input_ids": tokens}
    inputs |= {"attention_mask": torch.ones_like(tokens), "ref_logps": torch.tensor(reference)}
    inputs["ref_KL_logps"] = torch.tensor(other_references)
    model = functools.partial(lambda leaf, **_: outputs(leaf * torch.tensor(mask)), leaf)
    loss = kto_loss(trainer(**own), model, inputs, False)
    result["kto"] = gradient(loss, leaf) | {"other_sums": other_sums.tolist()}
    result["kto"]["other_references"] = other_references.tolist()

    def grpo(logps: Any, mask: np.ndarray, kind: str) -> Any:
        own = {"loss_type": kind, "importance_sampling_level": "token", "use_vllm": True}
        own |= {"vllm_importance_sampling_correction": True, "top_entropy_quantile": 1.0}
        own |= {"off_policy_mask_threshold": None, "_entropy_bonus_enabled": False}
        own |= {
            "epsilon_low": CLIP_LOW,
            "epsilon_high": CLIP_HIGH,
            "max_completion_length": DIVISOR,
        }
        own |= {"current_gradient_accumulation_steps": 1}
        own["args"] = SimpleNamespace(
            delta=None, use_bias_correction_kl=False, steps_per_generation=1
        )
        own["_get_per_token_logps_and_entropies"] = lambda *_, **__: (logps, 0 * logps, None)
        values = {key: torch.tensor(x) for key, x in rollout(logps.detach().numpy()).items()}
        ones = torch.ones((len(mask), 1), dtype=torch.int64)
        inputs = {"prompt_ids": ones, "prompt_mask": ones, "advantages": values["advantage"]}
        inputs |= {"completion_ids": torch.tensor(mask), "completion_mask": torch.tensor(mask)}
        inputs |= {
            "old_per_token_logps": values["old"],
            "num_items_in_batch": torch.tensor(mask.sum()),
        }
        inputs["ref_per_token_logps"] = values["reference"]
        ratio = torch.exp(values["old"] - values["sampled"])  # as the trainer truncates it
        inputs["importance_sampling_ratio"] = torch.clamp(ratio, max=CAP)
        made = trainer(**own)
        made.accelerator.reduce, made.accelerator.num_processes = (lambda x, **_: x), 1
        return grpo_loss(made, None, inputs)

    values, mask = texts(np.random.default_rng(9), 2 * PAIRS)
    result["logps"], result["mask"] = values.tolist(), mask.tolist()
    for kind in ("dapo", "dr_grpo"):
        leaf = torch.tensor(values, requires_grad=True)
        loss = grpo(leaf, mask, kind)
        (grads,) = torch.autograd.grad(loss, leaf)
        result[kind] = {"loss": loss.item(), "gradient": grads.tolist()}

    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).float()
    shapes = {name: tuple(value.shape) for name, value in llama.state_dict().items()}
    weights = llama_weights(shapes)
    llama.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    rows, mask, reference = llama_batch()
    rows, halves = torch.tensor(rows), torch.tensor(reference).chunk(2)

    def forward(**_: Any) -> Any:
        logps = torch.log_softmax(llama(rows).logits[:, :-1], -1)
        own = logps.gather(2, rows[:, 1:, None])[..., 0]
        return outputs(own * torch.tensor(mask))

    inputs = {"completion_mask": padded(mask), "input_ids": rows}
    inputs["attention_mask"] = torch.ones_like(rows)
    inputs |= dict(zip(("ref_chosen_logps", "ref_rejected_logps"), halves, strict=True))

    def gradients(loss: Any) -> dict[str, Any]:
        llama.zero_grad()
        loss.backward()
        return {
            "loss": loss.item(),
            "gradients": {
                name: [float(f"{x:.7g}") for x in value.grad.flatten().tolist()]
                for name, value in llama.named_parameters()
            },
        }

    loss = dpo_loss(trainer(loss_types=["sigmoid"]), forward, inputs, False)
    result["llama"] = {"shapes": shapes} | gradients(loss)
    logps = torch.log_softmax(llama(rows).logits[:, :-1], -1).gather(2, rows[:, 1:, None])[..., 0]
    result["llama_grpo"] = {"logps": logps.tolist()} | gradients(grpo(logps, mask, "dapo"))
    return result


if __name__ == "__main__":
    PATH.write_text(json.dumps(make()) + "\n")
