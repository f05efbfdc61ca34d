"""The client for what is served, by HTTP or gRPC."""

from specpipe.triton.client.client import Client, Completion

__all__ = ["Client", "Completion"]
