"""Prompts for benchmarks.gpu and peers.py: pieces of sources of the standard library, as token ids.

    python -m benchmarks.source_prompts models/python-code/target --number 5 > prompts.json

A run of both on one machine reads the same prompts: what the standard library has differs between
versions of Python.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shutil
from pathlib import Path

from specpipe.text.tokenizer import Tokenizer

NUM_TOKENS = 128
_STRIDE = 97


def source_prompts(tokenizer: Tokenizer, number: int, length: int = NUM_TOKENS) -> list[list[int]]:
    """Pieces of three modules, each a little further on."""
    files = (inspect.getsourcefile(module) for module in (json, os, shutil))
    text = "".join(Path(file).read_text(encoding="utf-8") for file in files if file is not None)
    token_ids = tokenizer.encode(text)
    starts = range(0, number * _STRIDE, _STRIDE)
    return [token_ids[start : start + length] for start in starts]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="the folder of a tokenizer")
    parser.add_argument("--number", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="of each")
    arguments = parser.parse_args(argv)
    tokenizer = Tokenizer.load(arguments.checkpoint)
    print(json.dumps(source_prompts(tokenizer, arguments.number, arguments.tokens)))


if __name__ == "__main__":
    main()
