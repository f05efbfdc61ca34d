"""A whole Triton repository: written, read, and held against rules.

The models in a repository import this package, so that its names stay where they are.
"""

from specpipe.triton.repository.contents import (
    load_limits,
    load_pair,
    load_tokenizer,
    parameter_path,
    read_limits,
    read_pair_file,
    tokenizer_folder,
    write,
)

__all__ = [
    "load_limits",
    "load_pair",
    "load_tokenizer",
    "parameter_path",
    "read_limits",
    "read_pair_file",
    "tokenizer_folder",
    "write",
]
