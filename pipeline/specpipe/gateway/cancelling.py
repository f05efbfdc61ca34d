"""Cancels requests at the server that runs them, by the ids that they were sent with.

Closing a stream alone ends a request of the ensemble with its next chunk, which one that waits, or
answers as a whole, has not (cancel_ids.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from specpipe.runtimes.repository_layout import ENSEMBLE, SPECULATIVE
from specpipe.triton import serving
from specpipe.triton.client.grpc_messages import write_tensors
from specpipe.triton.secret import Signer

_TIME_S = 5.0  # a guess at what a server takes at most that is not about to end


class Canceller:
    """Cancels behind the back of whoever has gone; without the secret of the server, nothing."""

    def __init__(self, stub: Any, signer: Signer) -> None:
        """stub  of Triton's service"""
        self._stub, self._signer = stub, signer
        self._tasks: set[asyncio.Task[None]] = set()

    def cancel(self, cancel_id: str) -> None:
        """Begins to cancel a request; returns at once."""
        if self._signer.has_secret:
            task = asyncio.create_task(self._cancel(cancel_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Waits for what has begun."""
        await asyncio.gather(*self._tasks)

    async def _cancel(self, cancel_id: str) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, StopIteration):
            call = self._stub.ModelStreamInfer(timeout=_TIME_S)
            signature = self._signer.sign(serving.CANCEL.name, cancel_id.encode())
            tensors = {serving.CANCEL: [cancel_id], serving.SIGNATURE: [signature]}
            await call.write(write_tensors(await self._model(), tensors))
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass

    async def _model(self) -> str:
        """Returns what the ensemble calls its `speculative` now (versions.py)."""
        asked = service_pb2.ModelConfigRequest(name=ENSEMBLE)
        config = (await self._stub.ModelConfig(asked, timeout=_TIME_S)).config
        names = [step.model_name for step in config.ensemble_scheduling.step]
        return str(next(name for name in names if name.startswith(SPECULATIVE)))
