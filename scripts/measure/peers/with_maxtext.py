"""Train with MaxText's own loop, each iteration of which is timed."""

# pyright: reportMissingImports=false

import os
import sys
from typing import Any

os.environ["DECOUPLE_GCLOUD"] = "TRUE"

import jax
from clock import Clock, read_task
from maxtext.trainers.pre_train import train


def arguments(task: dict[str, Any]) -> list[str]:
    """Return MaxText's settings of the shape."""
    config = task["config"]
    values = {
        "run_name": "peers",
        "base_output_directory": task["scratch"],
        "hardware": "cpu",
        "jax_cache_dir": "",
        "skip_jax_distributed_system": True,
        "steps": task["steps"] + 1,
        "dataset_type": "synthetic",
        "packing": False,
        "per_device_batch_size": config["per_replica_batch"],
        "max_target_length": config["seq"],
        "decoder_block": "llama2",
        "base_num_decoder_layers": config["layers"],
        "base_emb_dim": config["d_model"],
        "base_num_query_heads": config["n_heads"],
        "base_num_kv_heads": config["key_heads"],
        "head_dim": config["d_model"] // config["n_heads"],
        "base_mlp_dim": config["ff_size"],
        "vocab_size": config["n_vocab"],
        "logits_via_embedding": False,
        "dtype": "float32",
        "weight_dtype": "float32",
        "matmul_precision": "highest",
        "attention": "dot_product",
        "remat_policy": "none",
        "opt_type": "adamw",
        "learning_rate": 1e-4,
        "adam_weight_decay": 0.1,
        "gradient_clipping_threshold": 1.0,
        "enable_checkpointing": False,
        "enable_tensorboard": False,
        "enable_goodput_recording": False,
        "monitor_goodput": False,
        "log_config": False,
    }
    return [f"{key}={value}" for key, value in values.items()]


def main() -> None:
    task = read_task()
    clock = Clock(task["began"])
    losses = []
    iteration = train.training_loop_iteration

    def timed(state: dict[str, Any], *others: Any) -> Any:
        metrics = iteration(state, *others)
        jax.block_until_ready(state["state"])
        losses.append(metrics["scalar"]["learning/loss"])
        clock.step_ended()
        return metrics

    train.training_loop_iteration = timed
    base = os.path.join(os.path.dirname(train.__file__), "../../configs/base.yml")
    train.main([sys.argv[0], base, *arguments(task)])
    clock.report("maxtext", "jax", loss=float(losses[0]))


if __name__ == "__main__":
    main()
