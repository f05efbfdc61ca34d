"""The road from two checkpoints to a Triton repository."""
