"""A model's `config.pbtxt`, written and read as Triton's own ModelConfig message."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from specpipe.errors import RepositoryError


def to_text(config: pb.ModelConfig) -> str:
    """Returns the config as `config.pbtxt`, parsed back once to be sure that it says the same."""
    text: str = text_format.MessageToString(config)
    assert text_format.Parse(text, pb.ModelConfig()) == config
    return text


def read_config(path: Path) -> pb.ModelConfig:
    """Parses a `config.pbtxt`; raises RepositoryError with the file, line and column."""
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), pb.ModelConfig())
    except OSError as exc:
        raise RepositoryError(f"{path} cannot be read: {exc.strerror}") from exc
    except (text_format.ParseError, UnicodeDecodeError) as exc:
        raise RepositoryError(f"{path} is not a model configuration: {exc}") from exc


def parameter(config: pb.ModelConfig, name: str) -> str | None:
    """Returns a parameter's text, None when the config does not have it."""
    if name not in config.parameters:
        return None
    value: str = config.parameters[name].string_value
    return value
