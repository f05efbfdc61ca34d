"""The two models: what they are, in which formats, and how large."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from specpipe.evaluate.report import conditions
from specpipe.evaluate.report.artifact import Artifact
from specpipe.evaluate.report.blocks import UNKNOWN, Block, Column, Table, size
from specpipe.roles import ROLES, Role

ReadCell = Callable[[Artifact, Role], str]


def blocks(artifact: Artifact) -> Iterator[Block]:
    """Yields what both models are."""
    yield Table(
        "Models and formats",
        (Column("", is_text=True), *(Column(role, is_text=True) for role in ROLES)),
        [
            [label, *(read(artifact, role) for role in ROLES)]
            for label, read in _PROPERTIES
            if any(read(artifact, role) != UNKNOWN for role in ROLES)
        ],
    )
    yield Table(
        "Sizes",
        (Column("", is_text=True), *(Column(role) for role in ROLES)),
        [[label, *cells] for label, *cells in _sizes(artifact)],
        note="Sizes of files. The repository shares its engines with the folders they were built "
        "in, where the file system has hard links.",
    )


def _of_model(*keys: str) -> ReadCell:
    def read(artifact: Artifact, role: Role) -> str:
        config = artifact.engines[role].get("pretrained_config", {})
        values = [config.get(key) for key in keys]
        return UNKNOWN if None in values else " / ".join(str(value) for value in values)

    return read


def _of_build(key: str) -> ReadCell:
    def read(artifact: Artifact, role: Role) -> str:
        return str(artifact.engines[role].get("build_config", {}).get(key, UNKNOWN))

    return read


def checkpoint_name(artifact: Artifact, role: Role) -> str:
    source = artifact.sources.get(role)
    if source is None:
        return UNKNOWN
    if source.commit is not None:
        return f"{source.name} @ {source.commit[:12]}"
    # Where it lay on the machine that built it matters to nobody else.
    return "/".join(Path(source.name).parts[-3:])


_PROPERTIES: tuple[tuple[str, ReadCell], ...] = (
    ("checkpoint", checkpoint_name),
    ("architecture", _of_model("architecture")),
    (
        "layers / hidden size / heads / key-value heads",
        _of_model("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    ),
    ("vocabulary", _of_model("vocab_size")),
    ("context of the checkpoint, tokens", _of_model("max_position_embeddings")),
    ("dtype of the checkpoint", _of_model("dtype")),
    (
        "quantization",
        lambda artifact, role: conditions.quantized(artifact.engines[role]) or "none",
    ),
    ("dtype of the engine", _of_build("dtype")),
    ("device", _of_build("device")),
    ("sequences at once", _of_build("max_batch_size")),
    ("tokens of a sequence", _of_build("max_seq_len")),
)


def _sizes(artifact: Artifact) -> Iterator[list[str]]:
    sources = [artifact.sources.get(role) for role in ROLES]
    yield ["checkpoint", *(size(s.size_bytes if s else None) for s in sources)]
    names = dict.fromkeys(
        Path(built.path).name
        for built in artifact.built
        if any(built.path.startswith(f"{role}/") for role in ROLES)
    )
    by_path = {built.path: built.size_bytes for built in artifact.built}
    for name in names:
        label = "unified checkpoint" if name == "checkpoint" else name
        yield [label, *(size(by_path.get(f"{role}/{name}")) for role in ROLES)]
