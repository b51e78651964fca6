"""GPT-J as pure functions: layers, attention, loss, LoRA and FLOPs."""
