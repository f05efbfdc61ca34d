"""Quantized checkpoints: the formats, how they are calibrated, and the tensors that they hold."""
