"""What a door is told: by the command line, or by its environment as a child of `serve`."""

from __future__ import annotations

from pathlib import Path

from specpipe.section import Section

VARIABLE = "SPECPIPE_GATEWAY"
"""Settings as JSON, for a child."""

PROBE_KEY_VARIABLE = "SPECPIPE_GATEWAY_PROBE_KEY"
"""A key of this start, by which `specpipe serve` asks its door whether it answers."""


class GatewaySettings(Section):
    """Where the door listens, what it stands before, and who may come in."""

    listen: str
    """[HOST:]PORT."""

    listener: int | None = None
    """The file descriptor of a socket that is bound there."""

    urls: tuple[str, ...]
    """The Tritons, grpc://HOST:PORT."""

    repository: Path
    """The built repository, for the tokenizer and the limits."""

    names: tuple[str, ...]
    """What the model is called; the first is its own name."""

    request_timeout_s: float
    """What the servers give an answer at most."""

    keys: Path | None = None
    """The file of keys."""

    allow_no_keys: bool = False
    """Whether others may be answered without one."""

    is_lenient: bool = False
    """Whether unknown fields are logged instead of refused."""

    has_access_log: bool = True
    """Whether each request gets a line on stderr."""

    log_prompts: bool = False
    """Whether that line has the beginning of the body."""

    drain_timeout_s: float = 30.0
    """What requests have to finish when the door is told to end."""
