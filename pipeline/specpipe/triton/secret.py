"""Who may call `speculative`: the models of the ensemble, which share a secret of this start.

Triton 2.51 cannot keep clients from a model of an ensemble: any client may ask
`preprocessing`, `speculative` and `postprocessing` by name. The launcher therefore puts a random
secret into the environment of Triton, which the processes of the models inherit, and which stands
in no file, command line, log or message:

request  `preprocessing` signs what it hands on, request and token ids together (HMAC-SHA-256), and
         `speculative` refuses what bears no such signature. The secret itself never leaves a
         process: a client that asks `preprocessing` gets a signature of what was validated for it,
         and can do with it what it can do through the ensemble, and nothing else.
cancel   `postprocessing` signs the id of the stream whose client it finds gone. A client that asks
         `postprocessing` itself, and cancels that call, makes it sign an id of the client's
         choice; but a stream's id is 122 random bits, which go from `speculative` to
         `postprocessing` alone. No output of the ensemble and no message has it.

           The door for OpenAI's clients (specpipe/gateway) knows the secret and signs the id that
           it drew for its own request, which Triton hands on (cancel_ids.py).

A program that asks `speculative` on purpose, as `specpipe verify` asks the servers that it starts,
signs with the same secret (`Server.secret`). An operator who wants a known one sets SPECPIPE_SECRET
where the server starts. A tritonserver that is started by hand, without the variable, checks
nothing. Nor can the models `draft` and `target` of TensorRT-LLM's C++ backend, which are not
specpipe's.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping

from specpipe.errors import RequestError

VARIABLE = "SPECPIPE_SECRET"


def secret_of_start(environment: Mapping[str, str]) -> str:
    """Returns the secret that an environment has for its servers, else a new one."""
    return environment.get(VARIABLE) or secrets.token_hex(32)


class Signer:
    """Signs for one purpose, and knows its signatures; without a secret it takes any."""

    def __init__(self, secret: str | None) -> None:
        self._secret = secret

    @classmethod
    def from_environment(cls) -> Signer:
        """Returns the signer of a model's process."""
        return cls(os.environ.get(VARIABLE) or None)

    @property
    def has_secret(self) -> bool:
        return self._secret is not None

    def sign(self, purpose: str, *parts: bytes) -> str:
        """Returns the signature of the parts, each of which stands for itself."""
        signature = hmac.new((self._secret or "").encode(), purpose.encode(), hashlib.sha256)
        for part in parts:
            signature.update(len(part).to_bytes(8, "big"))
            signature.update(part)
        return signature.hexdigest()

    def check(self, signature: bytes, purpose: str, *parts: bytes) -> None:
        """Raises RequestError unless `sign` made the signature of just these."""
        if self._secret is None:
            return
        if not hmac.compare_digest(signature, self.sign(purpose, *parts).encode()):
            raise RequestError("speculative takes requests from the ensemble only: ask 'ensemble'")
