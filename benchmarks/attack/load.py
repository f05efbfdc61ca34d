"""The well-behaved streams of a load, and what becomes of each of their requests.

Every answer is judged when it came: benchmarks.attack compares it with the one that the idle server
gave beforehand to the same question, asked alone and without draft tokens, benchmarks.soak with
those of all versions. An answer that its client broke off must be the beginning of the right one.

The wait of a request is the longest time in which nothing of it came: until the first chunk,
between two chunks, or from the last chunk to the end. For a whole answer it is the time to it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from benchmarks.attack.send import infer_request, number, strings, stub
from benchmarks.attack.server import Served
from benchmarks.measure import PROMPTS, read_prompts
from specpipe.errors import ServerError, SpecpipeError
from specpipe.triton.client import Client

NUM_QUESTIONS = 48
SHARE_LEAVING = 0.15
TIMEOUT_S = 60.0
_RETRY_S = 0.5  # after an error, so that a server that is being restarted is not also stormed
_MAX_PROMPT_CHARACTERS = 600
_NUMBERED = re.compile(r"queue is full|waited|overdue|timeout")


class Piece(NamedTuple):
    """What one response brought, and the version of the model that it names, if it names one."""

    text: str
    version: str = ""


Pieces = Generator[Piece, None, None]
Ending = Literal["right", "broken off", "wrong", "refused", "failed"]


@dataclass(frozen=True)
class Question:
    """A prompt with settings that determine its answer."""

    prompt: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Answered:
    """One request of a well-behaved client; times by time.monotonic().

    wait_s, waited_from_s  its longest wait, and when that began
    """

    protocol: str
    ending: Ending
    started_s: float
    ended_s: float
    wait_s: float
    waited_from_s: float
    error: str = ""


@dataclass(frozen=True)
class Received:
    """What came of a question, by its number, from when it was asked; is_whole: up to its end."""

    question: int
    protocol: str
    started_s: float
    pieces: Sequence[Piece]
    is_whole: bool

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


Judge = Callable[[Received], Ending]


def questions(seed: int, count: int = NUM_QUESTIONS) -> list[Question]:
    """Prompts of the committed set, in turn greedy and sampled with a seed."""
    rng = random.Random(seed)
    prompts = read_prompts(PROMPTS)
    made = []
    for index in range(count):
        prompt = prompts[index % len(prompts)].prompt[-_MAX_PROMPT_CHARACTERS:]
        settings: dict[str, Any] = {"max_tokens": rng.randint(8, 40)}
        if index % 2:
            settings["temperature"] = round(rng.uniform(0.4, 1.2), 2)
            settings["seed"] = rng.getrandbits(63)
        if rng.random() < 0.3:
            settings["top_k"] = rng.randint(2, 50)
            settings.setdefault("seed", rng.getrandbits(63))
        if rng.random() < 0.3:
            settings["stop_words"] = ["\n\n", "return"]
        if rng.random() < 0.2:
            settings["repetition_penalty"] = 1.2
        made.append(Question(prompt, settings))
    return made


def right_answers(served: Served, asked: Sequence[Question]) -> list[str]:
    """Asks each question alone, without draft tokens."""
    with Client(served.grpc_url, timeout_s=TIMEOUT_S) as client:
        return [
            client.generate(question.prompt, num_draft_tokens=0, **question.settings).text
            for question in asked
        ]


def by_answers(expected: Sequence[str]) -> Judge:
    """Judges by the one right answer of each question."""
    return lambda received: judge(
        expected[received.question], received.text, is_whole=received.is_whole
    )


def judge(expected: str, text: str, *, is_whole: bool) -> Ending:
    """Compares what came with the right answer; part of an answer must be its beginning."""
    if is_whole:
        return "right" if text == expected else "wrong"
    return "broken off" if expected.startswith(text) else "wrong"


class Load:
    """Streams that ask question after question until they are told to end.

    What a stream asks, in which protocol and how it ends, follows from the seed and its number.
    """

    def __init__(
        self,
        served: Served,
        asked: Sequence[Question],
        judge: Judge,
        seed: int,
        *,
        share_leaving: float = SHARE_LEAVING,
    ) -> None:
        """share_leaving  of the requests whose client goes away in the middle"""
        self._served, self._asked, self._judge = served, asked, judge
        self._seed, self._share_leaving = seed, share_leaving
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.answered: list[Answered] = []

    def begin(self, num_streams: int) -> None:
        """Starts the streams."""
        self._threads = [
            threading.Thread(target=self._run, args=(index,), daemon=True)
            for index in range(num_streams)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> list[Answered]:
        """Lets each stream end its last request, and returns what became of all."""
        self._is_over.set()
        deadline = time.monotonic() + 2 * TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            raise ServerError("a well-behaved client did not come to its end")
        return self.answered

    def _run(self, index: int) -> None:
        rng = random.Random(f"{self._seed}/{index}")
        while not self._is_over.is_set():
            answered = self._ask(rng)
            self.answered.append(answered)
            if answered.ending in ("refused", "failed"):
                self._is_over.wait(_RETRY_S)

    def _ask(self, rng: random.Random) -> Answered:
        number_of = rng.randrange(len(self._asked))
        protocol = rng.choice(list(PROTOCOLS))
        settings = dict(self._asked[number_of].settings)
        draft_tokens = rng.choice([None, None, 0, 2, 4])
        if draft_tokens is not None:
            settings["num_draft_tokens"] = draft_tokens
        # Some go away in the middle: after so many chunks, by a cancel or by closing.
        until = rng.randint(1, 5) if rng.random() < self._share_leaving else None
        received: list[Piece] = []
        error = ""
        is_whole = True
        moments = [time.monotonic()]
        try:
            pieces = PROTOCOLS[protocol](self._served, self._asked[number_of].prompt, settings)
            with contextlib.closing(pieces):
                for count, piece in enumerate(pieces, 1):
                    moments.append(time.monotonic())
                    received.append(piece)
                    if count == until:
                        is_whole = False
                        break
        except Exception as exc:  # whatever a client may meet is counted, and named
            error = str(exc) or repr(exc)
        if is_whole:
            moments.append(time.monotonic())
        ending = self._judge(
            Received(number_of, protocol, moments[0], received, is_whole and not error)
        )
        if error and ending != "wrong":
            ending = "refused" if _NUMBERED.search(error) else "failed"
        gaps = [later - earlier for earlier, later in zip(moments, moments[1:], strict=False)]
        wait_s = max(gaps)
        return Answered(
            protocol, ending, moments[0], moments[-1], wait_s, moments[gaps.index(wait_s)], error
        )


def _http_whole(served: Served, prompt: str, settings: dict[str, Any]) -> Pieces:
    with Client(served.http_url, timeout_s=TIMEOUT_S) as client:
        yield _checked(client.generate(prompt, **settings))


def _http_stream(served: Served, prompt: str, settings: dict[str, Any]) -> Pieces:
    return _streamed(served.http_url, prompt, settings)


def _grpc_stream(served: Served, prompt: str, settings: dict[str, Any]) -> Pieces:
    return _streamed(served.grpc_url, prompt, settings)


def _streamed(url: str, prompt: str, settings: dict[str, Any]) -> Pieces:
    last = None
    with (
        Client(url, timeout_s=TIMEOUT_S) as client,
        contextlib.closing(client.stream(prompt, **settings)) as chunks,  # type: ignore[type-var]
    ):
        for last in chunks:
            yield _checked(last)
    if last is None or last.finish_reason is None:
        raise SpecpipeError("the stream ended without a last response")


def _checked(completion: Any) -> Piece:
    if completion.finish_reason not in (None, "stop", "length"):
        raise SpecpipeError(f"the answer ended as {completion.finish_reason}")
    return Piece(completion.text)


def _plain_http(served: Served, prompt: str, settings: dict[str, Any]) -> Pieces:
    """`generate_stream` with nothing but the standard library; goes away by closing."""
    target = served.target
    connection = http.client.HTTPConnection(target.host, target.http_port, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        body = json.dumps({"text_input": prompt, "stream": True, **settings})
        connection.request("POST", "/v2/models/ensemble/generate_stream", body)
        reason = None
        response = connection.getresponse()
        if response.status != 200:
            raise SpecpipeError(response.read().decode(errors="replace"))
        for line in response:
            if line.startswith(b"data:"):
                event = json.loads(line.removeprefix(b"data:"))
                if event.get("error"):
                    raise SpecpipeError(event["error"])
                reason = event.get("finish_reason", reason)
                yield Piece(event["text_output"], event["model_version"])
        if reason not in ("stop", "length"):
            raise SpecpipeError(f"the stream ended as {reason}")


def _plain_grpc(served: Served, prompt: str, settings: dict[str, Any]) -> Pieces:
    """ModelStreamInfer with the stub that protobuf makes; goes away by closing its channel."""
    tensors = [strings("text_input", [prompt.encode()]), number("stream", True, "BOOL")]
    for name, value in settings.items():
        if isinstance(value, list):
            tensors.append(strings(name, [word.encode() for word in value]))
        else:
            dtype = "UINT64" if name == "seed" else "FP32" if isinstance(value, float) else "INT32"
            tensors.append(number(name, value, dtype))
    request = infer_request(tensors)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    is_final = False
    with stub(served.target) as triton:
        for response in triton.ModelStreamInfer(iter([request]), timeout=TIMEOUT_S):
            if response.error_message:
                raise SpecpipeError(response.error_message)
            found = response.infer_response
            outputs = zip(found.outputs, found.raw_output_contents, strict=True)
            texts = {o.name: raw[4:].decode() for o, raw in outputs if o.datatype == "BYTES"}
            if texts.get("finish_reason", "stop") not in ("stop", "length"):
                raise SpecpipeError(f"the answer ended as {texts['finish_reason']}")
            if "text_output" in texts:
                yield Piece(texts["text_output"], found.model_version)
            is_final = found.parameters["triton_final_response"].bool_param
    if not is_final:
        raise SpecpipeError("the stream ended without a last response")


PROTOCOLS: dict[str, Callable[[Served, str, dict[str, Any]], Pieces]] = {
    "HTTP generate": _http_whole,
    "HTTP generate_stream": _http_stream,
    "gRPC stream": _grpc_stream,
    "HTTP generate_stream, http.client": _plain_http,
    "gRPC stream, bare stub": _plain_grpc,
}
