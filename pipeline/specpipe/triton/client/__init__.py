"""The client for what is served, by HTTP or gRPC."""

from specpipe.triton.client.client import Client
from specpipe.triton.client.completion import Completion, read_completion

__all__ = ["Client", "Completion", "read_completion"]
