"""Sets of prompts as token ids: pieces of sources of Python's standard library.

All sides of a run read the same ones: what the standard library has differs between versions of
Python.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from specpipe.text.tokenizer import Tokenizer

_FILES = {
    "files": "shutil os tarfile tempfile fileinput glob posixpath mailbox",
    "text": "json/decoder argparse optparse textwrap difflib csv configparser pprint string locale",
    "network": "http/client urllib/request email/message smtplib subprocess threading ftplib",
}
SETS = tuple(_FILES)


def prompt_set(tokenizer: Tokenizer, name: str, *, number: int, length: int) -> list[list[int]]:
    """Pieces of so many tokens, at equal distances all over the sources of a set."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [library / f"{file}.py" for file in _FILES[name].split()]
    token_ids = tokenizer.encode("".join(file.read_text(encoding="utf-8") for file in files))
    last = len(token_ids) - length
    if last < number:
        raise ValueError(f"set {name} has {len(token_ids)} tokens, too few for pieces of {length}")
    starts = (i * last // number for i in range(number))
    return [token_ids[start : start + length] for start in starts]
