"""specpipe: two checkpoints in, a draft–target pair served by Triton out."""

__version__ = "0.1.0"
