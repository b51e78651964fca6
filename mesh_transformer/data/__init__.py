"""The data pipeline from text to batches: tokenizers, packing, TFRecords and loading."""
