"""Whether weights saved under one config are of the model, or of the run, of another."""

from typing import Any

from mesh_transformer.config import Config
from mesh_transformer.util import InputError


def check_same_model(config: Config, saved: dict[str, Any], where: str) -> None:
    """Raises InputError where weights saved under another config would compute otherwise.

    Their shapes may still agree: heads, norm or rotary dims leave no trace in them.
    """
    there = Config.from_dict(saved, f"{where}: saved config")
    keys = ["block", "norm", "pe", "n_heads", "head_size", "pe_rotary_dims"]
    if there.lora_rank and config.lora_rank:  # else one is the other's base, or merged
        keys += ["lora_rank", "lora_alpha", "lora_targets"]
    for key in keys:
        if getattr(there, key) != getattr(config, key):
            raise InputError(
                f"{where}: its model has {key} {getattr(there, key)!r}, the config "
                f"{getattr(config, key)!r}; use the config that it was trained with"
            )
    # At its default a window is all of seq, which may change from run to run.
    chosen = there.window != there.seq or config.window != config.seq
    if chosen and there.window != config.window:
        raise InputError(
            f"{where}: its model has attention_window {there.window}, the config "
            f"{config.window}; use the config that it was trained with"
        )


def check_same_run(config: Config, saved: dict[str, Any], where: str) -> None:
    """Raises InputError where a run cannot go on from the state of one under a saved config."""
    check_same_model(config, saved, where)
    there = Config.from_dict(saved, f"{where}: saved config")
    if bool(there.lora_rank) != bool(config.lora_rank):
        kinds = ("all of a model", "adapters")
        raise InputError(
            f"{where}: is of a run that trains {kinds[there.lora_rank > 0]} (lora_rank "
            f"{there.lora_rank}), the config has lora_rank {config.lora_rank}; choose another "
            "model folder, and begin from this one with --tune-model-path"
        )
