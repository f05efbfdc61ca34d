"""Calibration texts: rows of a file, or the small set that comes with specpipe, as token ids.

Rows are taken in the order of the file. What cannot be used is refused with its line, except for
empty rows, which are left out and counted.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.checkpoints.files import read_json
from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.errors import ConfigError, RequestError, RuntimeUnavailable
from specpipe.machine.libraries import with_library
from specpipe.text.chat_messages import check_messages, text_of
from specpipe.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specpipe.config.sections import CalibrationConfig

BUILTIN = "builtin"

_BUILTIN_FILE = Path(__file__).with_name("builtin.jsonl")
_COLUMNS = ("text", "messages")  # what a file without `calibration.column` is searched for
_HELD_OUT = 8  # every eighth text, the first one included
_MIN_TEXTS = 2  # one to measure activations on, one that is held out
_MIN_TOKENS = 2  # of a text: one to predict, and one before it
_MAX_LISTED = 10  # columns that a message lists
_MAX_CHARS = 40  # of a row's value in a message

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class Texts:
    """What activations are measured on, and what is only used to say what quantization costs.

    digest       SHA-256 of the rows as they stand in the file, whatever the tokenizer
    description  for reports: how many texts there are, where they come from, what was left out
    """

    calibration: tuple[TokenIds, ...]
    held_out: tuple[TokenIds, ...]
    digest: str
    description: str


def data_file(calibration: CalibrationConfig, base_dir: Path) -> Path:
    """Returns the file that holds the texts; relative paths start at `base_dir`."""
    return _BUILTIN_FILE if calibration.data == BUILTIN else base_dir / calibration.data


def check_data(calibration: CalibrationConfig, base_dir: Path) -> None:
    """Refuses, before anything is read, data that is not there or of no known kind."""
    path = data_file(calibration, base_dir)
    if path.suffix.lower() not in (".jsonl", ".txt", ".parquet"):
        raise ConfigError(
            f"calibration.data is {calibration.data}, expected {BUILTIN} or the name of a .jsonl, "
            ".txt or .parquet file"
        )
    has_columns = calibration.data != BUILTIN and path.suffix.lower() != ".txt"
    if calibration.column is not None and not has_columns:
        raise ConfigError(
            f"calibration.column is {calibration.column!r}, but {calibration.data} has no columns; "
            "leave it out"
        )
    if not path.is_file():
        fault = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"calibration.data: {path} {fault}")
    if path.stat().st_size == 0:
        raise ConfigError(f"{path} is empty; calibration needs at least {_MIN_TEXTS} texts")
    if path.suffix.lower() == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise RuntimeUnavailable(
            f"reading {path} needs 'pyarrow', unless the texts are saved as .jsonl: "
            f"{with_library('pyarrow')}"
        )


def read_texts(
    calibration: CalibrationConfig,
    base_dir: Path,
    checkpoint: Path,
    limits: FileLimits = FILE_LIMITS,
) -> Texts:
    """Reads and encodes the texts with the tokenizer, and the chat template, of a checkpoint.

    A text ends after `max_seq_len` tokens, or after as many as the model has positions. Raises
    ConfigError for data that cannot be used, with its file and line.
    """
    path = data_file(calibration, base_dir)
    check_data(calibration, base_dir)
    tokenizer = Tokenizer.load(checkpoint, limits)
    config = read_json(checkpoint / "config.json", default={}, limits=limits)
    positions = config.get("max_position_embeddings")
    limit = min(calibration.max_seq_len, positions if isinstance(positions, int) else 2**31)
    digest = hashlib.sha256()
    texts: list[TokenIds] = []
    num_empty = 0
    for row in _read_rows(path, calibration.column):
        if row.is_empty:
            num_empty += 1
            continue
        token_ids = _encode(tokenizer, row, checkpoint, flatten=calibration.data == BUILTIN)
        if len(token_ids) < _MIN_TOKENS:
            raise ConfigError(
                f"{row.place}: {_short(row.value)} has fewer than {_MIN_TOKENS} tokens, so there "
                "is none to predict; remove the row"
            )
        digest.update(json.dumps(row.value, sort_keys=True).encode() + b"\n")
        texts.append(tuple(token_ids[:limit]))
        if len(texts) == calibration.num_samples:
            break
    if len(texts) < _MIN_TEXTS:
        raise ConfigError(
            f"{path} holds {'one text' if texts else 'no text'}"
            f"{f' and {num_empty} empty rows' if num_empty else ''}; calibration needs at least "
            f"{_MIN_TEXTS}, as some are held out to measure what it costs"
        )
    source = "specpipe's own set" if calibration.data == BUILTIN else path.name
    held_out = texts[::_HELD_OUT]
    del texts[::_HELD_OUT]
    return Texts(
        tuple(texts),
        tuple(held_out),
        digest.hexdigest(),
        f"{len(texts)} texts of {source} with {sum(map(len, texts)):,} tokens, and "
        f"{len(held_out)} with {sum(map(len, held_out)):,} held out"
        f"{f'; {num_empty} empty rows left out' if num_empty else ''}",
    )


@dataclass(frozen=True)
class _Row:
    """One value of the column: a text, a list of messages, or None.

    place  its file and line
    """

    place: str
    value: Any

    @property
    def is_empty(self) -> bool:
        if isinstance(self.value, str):
            return not self.value.strip()
        return self.value is None or self.value == []


def _encode(tokenizer: Tokenizer, row: _Row, checkpoint: Path, *, flatten: bool) -> list[int]:
    """Encodes a row as serving would; `flatten` makes a plain text of chat without a template."""
    value = row.value
    is_flattened = isinstance(value, list) and tokenizer.chat_template is None
    if is_flattened and not flatten:
        raise ConfigError(
            f"{row.place}: the row holds chat messages, but {checkpoint} has no chat template; "
            "use a column of texts"
        )
    try:
        if is_flattened:
            value = "\n\n".join(map(text_of, check_messages(value)))
        if isinstance(value, str):
            return tokenizer.encode(value)
        if isinstance(value, list):
            return _encode_messages(tokenizer, value)
    except RequestError as exc:
        raise ConfigError(f"{row.place}: {exc}") from exc
    raise ConfigError(
        f"{row.place}: the value is {_short(value)}, expected a text or a list of messages"
    )


def _encode_messages(tokenizer: Tokenizer, messages: list[Any]) -> list[int]:
    """Encodes a conversation as the model sees it: the prompt, then the answer that it wrote."""
    *prompt, last = messages
    if prompt and isinstance(last, dict) and last.get("role") == "assistant":
        answer = last.get("content")
        if isinstance(answer, str):
            return [*tokenizer.encode_messages(prompt), *tokenizer.encode_fragment(answer)]
    return tokenizer.encode_messages(messages)


def _read_rows(path: Path, column: str | None) -> Iterator[_Row]:
    """Yields the rows of a column."""
    suffix = path.suffix.lower()
    if suffix == ".txt":
        return (_Row(place, line) for place, line in _lines(path))
    return _jsonl_rows(path, column) if suffix == ".jsonl" else _parquet_rows(path, column)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the lines of a file with their places."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                place = f"{path}:{number}"
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as exc:
                    raise ConfigError(
                        f"{place}: byte {line[exc.start]:#04x} is not UTF-8; save the file as UTF-8"
                    ) from exc
                yield place, text.rstrip("\r\n")
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc


def _jsonl_rows(path: Path, column: str | None) -> Iterator[_Row]:
    for place, line in _lines(path):
        if not line.strip():
            yield _Row(place, None)
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"{place}: not a row of JSON: {exc}") from exc
        if not isinstance(row, dict):
            raise ConfigError(
                f'{place}: the row is {_short(row)}, expected an object such as {{"text": "..."}}'
            )
        yield _Row(place, row[_find_column(place, row, column)])


def _parquet_rows(path: Path, column: str | None) -> Iterator[_Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as exc:  # one that was built for another NumPy
        raise RuntimeUnavailable(f"reading {path} needs 'pyarrow': {exc}") from exc
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = dict.fromkeys(file.schema_arrow.names)
            name = _find_column(str(path), names, column)
            for batch in file.iter_batches(batch_size=256, columns=[name]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield _Row(f"{path}: row {number}", value)
    except (pyarrow.ArrowException, OSError) as exc:
        raise ConfigError(f"{path} cannot be read as Parquet: {exc}") from exc


def _find_column(place: str, row: Mapping[str, Any], column: str | None) -> str:
    """Returns the column to read: the one that is set, else the one of `_COLUMNS` that is there."""
    names = [name for name in _COLUMNS if name in row] if column is None else [column]
    if len(names) == 1 and names[0] in row:
        return names[0]
    listed = ", ".join(map(str, list(row)[:_MAX_LISTED])) or "none"
    listed += f" and {len(row) - _MAX_LISTED} more" if len(row) > _MAX_LISTED else ""
    if column is not None:
        raise ConfigError(f"{place}: there is no column {column!r}; there are: {listed}")
    fault = "both columns text and messages" if names else "neither a column text nor messages"
    raise ConfigError(f"{place}: there are {fault}; set calibration.column to one of: {listed}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 3]}..."
