"""What the models of a repository import: it stays, since a repository outlives the code that made
it."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

MODELS = Path(__file__).parents[2] / "model_repo"

# Those of every repository that was built since 0.1.0. A name may join; none may go.
NAMES = {
    "specpipe.errors": {"FAULT", "RequestError", "ServerError", "to_sentence"},
    "specpipe.text": {"Tokenizer"},
    "specpipe.triton.answering": {"answer_each"},
    "specpipe.triton.loop": {"PairLoop"},
    "specpipe.triton.metrics": {"Counters"},
    "specpipe.triton.model_config": {"CANCELS"},
    "specpipe.triton.cancel_ids": {"CancelIds"},
    "specpipe.text.tools.message_format": {"MessageFormat"},
    "specpipe.triton.repository": {
        "load_pair",
        "read_limits",
        "read_pair_file",
        "tokenizer_folder",
    },
    "specpipe.triton.secret": {"Signer"},
    "specpipe.triton.serving": {
        "Answer",
        "CANCEL",
        "Generation",
        "STREAM_ID",
        "TEXT_OUTPUT",
        "parse_request",
        "read_cancel",
        "read_chunk",
        "write_cancel",
    },
}


def test_the_names_are_there() -> None:
    missing = {
        f"{module}.{name}"
        for module, names in NAMES.items()
        for name in names
        if not hasattr(importlib.import_module(module), name)
    }
    assert not missing


def test_the_models_of_today_use_no_other_names() -> None:
    used: dict[str, set[str]] = {}
    for path in MODELS.glob("*/1/model.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("specpipe"):
                for alias in node.names:
                    if f"{node.module}.{alias.name}" in NAMES:
                        modules[alias.name] = f"{node.module}.{alias.name}"
                    else:
                        used.setdefault(str(node.module), set()).add(alias.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
                used.setdefault(modules[ast.unparse(node.value)], set()).add(node.attr)
    assert used == NAMES
