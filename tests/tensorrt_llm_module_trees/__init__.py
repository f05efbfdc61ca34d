"""What TensorRT-LLM's module trees expect of a checkpoint: a table, and what expands it."""
