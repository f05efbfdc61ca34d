"""One Triton behind the door, asked over gRPC on asyncio.

One connection carries all streams. Each is read to its end, as Triton 2.51 keeps memory of those
that are closed before.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from specpipe.errors import FAULT, CutStream, NoAnswer, RequestError, ServerError
from specpipe.gateway.cancelling import Canceller
from specpipe.gateway.upstream import Busy
from specpipe.machine.callables import Clock
from specpipe.machine.web import is_here, parse_url
from specpipe.runtimes.pair.admission import QUEUE_FULL, is_for_load
from specpipe.runtimes.repository_layout import ENSEMBLE
from specpipe.triton.cancel_ids import new_cancel_id
from specpipe.triton.client.completion import Completion, check_reason, read_completion
from specpipe.triton.client.grpc_messages import is_final, read_values, write_request
from specpipe.triton.client.grpc_transport import last_cause
from specpipe.triton.client.transport import plain
from specpipe.triton.secret import Signer

_ANSWER_TIME_S = 2.0  # what a server that answers takes at most to say so
_PROBE_TIMEOUT_S = 30.0

# A server that is started again is found within a second.
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5000),  # which is how long connecting may take
    ("grpc.max_reconnect_backoff_ms", 1000),
)

# What Triton 2.51 and the loop say where the server cannot answer, whatever is asked.
_UNWELL = (
    "Request for unknown model",
    "is not healthy",
    "is stopping",
    "the draft-verify loop failed",
)

_REQUEST_ID = re.compile(r"\[request id: [^\]]*\] ?")  # by which Triton begins some; our own
_RATE_WINDOW_S = 60.0
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


class TritonUpstream:
    """An `Upstream` of one server; to be made where its event loop runs."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 630.0,
        probe_id: int = 0,
        signer: Signer | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """timeout_s  what an answer may take in all; a little more than the server gives it
        probe_id   a token that its model has
        signer     by which requests are cancelled at once; None: that of the environment
        """
        address = parse_url(url, ("grpc",))
        self.url = f"grpc://{address}"
        self._timeout_s, self._probe_id = timeout_s, probe_id
        proxy = ("grpc.enable_http_proxy", 0 if is_here(address.host) else 1)
        self._channel = grpc.aio.insecure_channel(str(address), (*_CHANNEL_OPTIONS, proxy))
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._infer = stub.ModelStreamInfer
        self._canceller = Canceller(stub, signer or Signer.from_environment())
        self._rate = CompletionRate(clock)
        self._clock = clock
        self.num_running = 0
        """Requests that wait for an answer, or for the rest of one."""
        self.last_response_s = float("-inf")
        """When the server last sent anything, by the clock."""

    async def close(self) -> None:
        await self._canceller.close()
        await self._channel.close()

    async def is_ready(self) -> bool:
        try:
            await self.probe(timeout_s=_PROBE_TIMEOUT_S)
        except ServerError:
            return False
        return True

    async def probe(self, *, timeout_s: float) -> None:
        """Sends one request for one token through everything; raises ServerError without answer.

        A server that refuses it for its load alone is well.
        """
        inputs = {
            "input_ids": [self._probe_id],
            "max_tokens": 1,
            "priority": -1,  # first in the queue
            "timeout_s": timeout_s,
            "stream": False,
        }
        try:
            limit_s = timeout_s + _ANSWER_TIME_S
            async with contextlib.aclosing(self._answer(inputs, limit_s)) as completions:
                async for _ in completions:
                    pass
        except RequestError as exc:
            if not is_for_load(str(exc)):
                raise ServerError(f"{self.url} refuses a request for one token: {exc}") from exc

    async def answer(
        self, inputs: Mapping[str, Any], *, sticky_key: str = ""
    ) -> AsyncGenerator[Completion, None]:
        self.num_running += 1
        try:
            async with contextlib.aclosing(self._answer(inputs, self._timeout_s)) as completions:
                async for completion in completions:
                    yield completion
        finally:
            self.num_running -= 1
        self._rate.count()

    async def _answer(
        self, inputs: Mapping[str, Any], timeout_s: float
    ) -> AsyncGenerator[Completion, None]:
        num_received = 0
        finish_reason = None
        cancel_id = new_cancel_id()
        call = self._infer(timeout=timeout_s)
        try:
            await call.write(write_request(ENSEMBLE, inputs, request_id=cancel_id))
            while (message := await call.read()) is not grpc.aio.EOF:
                self.last_response_s = self._clock()
                if message.error_message:
                    said = _REQUEST_ID.sub("", message.error_message)
                    raise self._refusal(plain(said), num_received)
                response = message.infer_response
                is_last = is_final(response)
                if response.outputs:
                    values = read_values(response)
                    if num_received == 0 and values.get("finish_reason") == "cancelled":
                        raise NoAnswer(self.url, "it is about to end")
                    num_received += 1
                    check_reason(values, num_received, self.url, ENSEMBLE)
                    completion = read_completion(values, self.url)
                    finish_reason = completion.finish_reason
                    yield completion
                if is_last:
                    await call.done_writing()
            if finish_reason is None and (code := await call.code()) is not grpc.StatusCode.OK:
                raise self._broken(code, await call.details(), num_received)
        except grpc.aio.AioRpcError as exc:
            if finish_reason is None:
                raise self._broken(exc.code(), exc.details(), num_received) from exc
        except (asyncio.CancelledError, GeneratorExit):  # nobody waits for the answer any more
            if finish_reason is None:
                self._canceller.cancel(cancel_id)
            raise
        finally:
            call.cancel()
        if finish_reason is None:
            raise self._cut("the stream was closed before the end", num_received)

    def _refusal(self, message: str, num_received: int) -> RequestError | ServerError:
        if num_received:
            return ServerError(f"the request failed: {message}")
        if QUEUE_FULL in message:
            return Busy(message, retry_after_s=self._rate.retry_after_s(message))
        if any(part in message for part in _UNWELL):
            return NoAnswer(self.url, message)
        if FAULT in message or is_for_load(message):
            return ServerError(message)
        return RequestError(message)

    def _broken(self, code: grpc.StatusCode, details: str | None, num_received: int) -> ServerError:
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            # Nothing against the server: another one would not be quicker.
            return ServerError(f"{self.url}: the answer took more than its time")
        return self._cut(last_cause(details or code.name), num_received)

    def _cut(self, reason: str, num_received: int) -> ServerError:
        if num_received == 0:
            return NoAnswer(self.url, reason)
        return CutStream.after(num_received, self.url, reason)


class CompletionRate:
    """How many requests a server ends in a second, by those of the last minute that came here."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s = clock()
        self._ends: deque[float] = deque()

    def count(self) -> None:
        """Takes in that one ended."""
        self._ends.append(self._clock())
        self._forget()

    def retry_after_s(self, refusal: str) -> float:
        """Returns the seconds after which the requests that wait now will have been started.

        refusal  what the pair says of its queue, with their number (admission.py)

        One end is added to those that were seen: a server that has just begun has ended none.
        """
        self._forget()
        told = re.search(r"(\d+) requests wait", refusal)
        num_waiting = int(told[1]) if told else 0
        window_s = min(self._clock() - self._began_s, _RATE_WINDOW_S)
        seconds = num_waiting * window_s / (len(self._ends) + 1)
        return min(max(seconds, _MIN_RETRY_S), _MAX_RETRY_S)

    def _forget(self) -> None:
        while self._ends and self._ends[0] < self._clock() - _RATE_WINDOW_S:
            self._ends.popleft()
