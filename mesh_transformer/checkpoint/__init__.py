"""Native, mesh-transformer-jax and Hugging Face checkpoints, and conversion between them."""
