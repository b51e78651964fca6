"""Native, original and Hugging Face checkpoints, and conversion between them."""
