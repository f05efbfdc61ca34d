"""Every failure that specpipe expects.

SpecpipeError
├── ConfigError           the YAML: file, key path, value, what was expected
├── CheckpointError       missing, truncated, or not the architecture that its config.json names
├── PairingError          draft and target cannot be paired: vocabulary, tokenizer, special tokens
├── RuntimeUnavailable    the library or GPU that a runtime needs is not here
├── EngineBuildError      the builder refused; ends with its last log lines
├── EngineMismatch        built for another GPU, runtime version or rank count
├── RepositoryError       the Triton repository would not load
├── RequestError          one request that cannot be served: the field, its value, the limit
└── ServerError           Triton did not start, died, or answered with an error

A message says what failed, where, and what to do about it. `cli.py` prints it and exits 1.
"""


class SpecpipeError(Exception):
    """Base of every failure that a user, a file or a machine can cause."""


class ConfigError(SpecpipeError):
    """The YAML says something that cannot be built."""


class CheckpointError(SpecpipeError):
    """A checkpoint is missing, incomplete, or of a kind that is not supported."""


class PairingError(SpecpipeError):
    """Draft and target do not share one vocabulary."""


class RuntimeUnavailable(SpecpipeError):
    """The library or the GPU that a runtime needs is not here."""


class EngineBuildError(SpecpipeError):
    """A builder refused its input or failed."""


class EngineMismatch(SpecpipeError):
    """An engine was built for something else than what would run it."""


class RepositoryError(SpecpipeError):
    """A Triton repository that would not load, or would not serve correctly."""


class RequestError(SpecpipeError):
    """A request that cannot be served; names the field, the value and the limit."""


class ServerError(SpecpipeError):
    """Triton did not start, died, or answered with an error."""
