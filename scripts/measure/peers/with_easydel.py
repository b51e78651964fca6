"""Train with EasyDeL's own trainer, each step of which is timed."""

# pyright: reportMissingImports=false

from typing import Any

import easydel as ed
import numpy as np
from clock import Clock, read_task
from datasets import Dataset
from easydel.trainers.trainer.trainer import Trainer
from flax import nnx
from jax import numpy as jnp


def model_of(config: dict[str, Any]) -> Any:
    """Return a Llama or a GPT-J with random weights."""
    sizes = [config[key] for key in ("layers", "d_model", "n_heads", "seq")]
    common = {"vocab_size": config["n_vocab"], "use_cache": False, "tie_word_embeddings": False}
    common |= {"attn_mechanism": "vanilla"}
    common |= {"gradient_checkpointing": ed.EasyDeLGradientCheckPointers.NONE}
    if config.get("block") == "llama":
        names = ["num_hidden_layers", "hidden_size", "num_attention_heads"]
        names.append("max_position_embeddings")
        common |= {"num_key_value_heads": config["key_heads"]}
        common |= {"intermediate_size": config["ff_size"]}
        kind, settings = ed.LlamaForCausalLM, ed.LlamaConfig
    else:
        names = ["n_layer", "n_embd", "n_head", "n_positions"]
        common |= {"rotary_dim": config["pe_rotary_dims"]}
        kind, settings = ed.GPTJForCausalLM, ed.GPTJConfig
    model_config = settings(**dict(zip(names, sizes, strict=True)), **common)
    return kind(model_config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))


def main() -> None:
    task = read_task()
    clock, config, count = Clock(task["began"]), task["config"], task["steps"] + 1
    losses = []
    step = Trainer._execute_train_step

    def timed(*args: Any, **keywords: Any) -> Any:
        result = step(*args, **keywords)  # it waits for the result
        losses.append(result[1].loss)
        clock.step_ended()
        return result

    Trainer._execute_train_step = timed
    arguments = ed.TrainingArguments(
        save_directory=task["scratch"],
        total_batch_size=config["per_replica_batch"],
        max_length=config["seq"],
        max_training_steps=count,
        num_train_epochs=1,
        learning_rate=1e-4,
        optimizer="adamw",
        weight_decay=0.1,
        clip_grad=1.0,
        do_last_save=False,
        use_wandb=False,
        shuffle_train_dataset=False,
        resume_if_possible=False,
    )
    tokens = np.load(task["tokens"])[:, :-1].astype(np.int32)
    rows = np.tile(tokens, (count, 1))
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": np.ones_like(rows)})
    Trainer(arguments=arguments, model=model_of(config), dataset_train=data).train()
    clock.report("easydel", "jax", loss=float(losses[0]))


if __name__ == "__main__":
    main()
