"""GPT-J as pure functions: layers, attention, loss and LoRA; parameter and FLOP counts."""
