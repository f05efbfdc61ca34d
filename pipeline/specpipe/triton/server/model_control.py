"""Loading and unloading models of a Triton that runs, by its admin calls."""

from __future__ import annotations

import re

from specpipe.errors import NoAnswer, ServerError, to_sentence
from specpipe.machine.web import parse_url
from specpipe.triton.client.grpc_transport import last_cause, open_grpc
from specpipe.triton.server.command import ADMIN_HEADER

_UNLOAD_TIME_S = 60.0  # to be told of it; Triton keeps what a request still needs: a guess

# What Triton 2.51 puts before and after the model's own words, and the Python backend after them.
_BEFORE = re.compile(r"^.*? version \S+ is at UNAVAILABLE state: (\w[\w ]*: )?", re.DOTALL)
_AFTER = re.compile(r"\s*(At:\s.*)?;?\s*$", re.DOTALL)


class ModelControl:
    """Triton's explicit model control over gRPC, which is there without HTTP, too."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = {f"triton-grpc-protocol-{ADMIN_HEADER}": key}

    def load(self, model: str, *, timeout_s: float) -> None:
        """Loads a model, or what became of its folder; raises ServerError with Triton's reason."""
        self._call("load_model", model, timeout_s)

    def unload(self, model: str) -> None:
        """Lets go of a model, which ends when the last request that needs it has.

        One that is not loaded is no fault.
        """
        self._call("unload_model", model, _UNLOAD_TIME_S)

    def _call(self, name: str, model: str, timeout_s: float) -> None:
        from tritonclient import grpc

        with open_grpc(parse_url(self._url, ("grpc",))) as client:
            try:
                getattr(client, name)(model, headers=self._headers, client_timeout=timeout_s)
            except grpc.InferenceServerException as exc:
                message = exc.message() or ""
                if exc.status() in ("StatusCode.UNAVAILABLE", "StatusCode.CANCELLED"):
                    raise NoAnswer(self._url, last_cause(message)) from exc
                if exc.status() == "StatusCode.DEADLINE_EXCEEDED":
                    raise NoAnswer(self._url, f"timed out after {timeout_s:g} s") from exc
                raise ServerError(f"{model}: {_reason(message)}") from exc


def _reason(message: str) -> str:
    """Returns the model's own words."""
    return to_sentence(_AFTER.sub("", _BEFORE.sub("", message)).replace("\n", " "))
