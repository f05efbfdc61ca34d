"""specpipe: two checkpoints in, a draft–target pair served by Triton out.

`__all__` is for programs (docs/python-api.md); whatever else there is may move.
"""

from specpipe.errors import (
    CheckpointError,
    ConfigError,
    CutStream,
    EngineBuildError,
    EngineMismatch,
    NoAnswer,
    PairingError,
    RepositoryError,
    RequestError,
    RuntimeUnavailable,
    ServerError,
    SignatureError,
    SpecpipeError,
    StoreError,
    TrainingError,
)
from specpipe.version import __version__

__all__ = [
    "CheckpointError",
    "Client",
    "Completion",
    "ConfigError",
    "CutStream",
    "EngineBuildError",
    "EngineMismatch",
    "NoAnswer",
    "PairingError",
    "RepositoryError",
    "RequestError",
    "RuntimeUnavailable",
    "ServerError",
    "SignatureError",
    "SpecpipeError",
    "Statistics",
    "StoreError",
    "TrainingError",
    "__version__",
]

TYPE_CHECKING = False  # to type checkers it is typing's, whose import would be most of this one's
if TYPE_CHECKING:
    from specpipe.speculative.request import Statistics
    from specpipe.triton.client import Client, Completion
else:

    def __getattr__(name: str) -> object:
        """Imports the client when it is asked for: `import specpipe` alone takes no time."""
        if name not in ("Client", "Completion", "Statistics"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from specpipe.speculative import request
        from specpipe.triton import client

        return getattr(request if name == "Statistics" else client, name)
