"""Holds the spellings of `model.yaml` against TensorRT-LLM's own source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from specpipe.runtimes.tensorrt_llm.llmapi.model_yaml import SPELLINGS, release_line


def llm_api_differences(source: str, version: str) -> Iterator[str]:
    """Looks for the spelling of `speculative_config` in llm_args.py, without importing it."""
    spelling = SPELLINGS.get(release_line(version))
    if spelling is None:
        yield f"specpipe writes no model.yaml for {version}"
        return
    name = "DraftTargetDecodingConfig"
    tree = ast.parse(source)
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    if spelling.decoding_type not in texts:
        yield f"it has no decoding type '{spelling.decoding_type}'"
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    if name not in classes:
        yield f"it has no class {name}"
        return
    fields = set(_field_names(classes, name))
    for field in ("max_draft_len", spelling.draft_model):
        if field not in fields:
            yield f"{name} has no field {field}"


def _field_names(classes: Mapping[str, ast.ClassDef], name: str) -> Iterator[str]:
    """The fields of a class and of its bases in the same file."""
    for statement in classes[name].body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _field_names(classes, base.id)
