"""Text and records to batches: storage, tokenizers, TFRecords, packing and loading."""
