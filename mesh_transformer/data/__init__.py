"""The data pipeline from text to batches: tokenizers, packing, TFRecords, loading and storage."""
