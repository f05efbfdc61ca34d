"""The quickstart pair on a real Triton that meets what clients, engines and signals do to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc

from specpipe.errors import RequestError, ServerError, SpecpipeError
from specpipe.runtimes.pair_file import PairFile
from specpipe.speculative.request import Request
from specpipe.triton import serving
from specpipe.triton.client import Client, Completion
from specpipe.triton.secret import Signer
from specpipe.triton.server import launcher
from specpipe.triton.server.options import ServeOptions
from specpipe.triton.server.server import Server
from tests.triton.asking import metrics
from tests.triton.faulty_pair import Controls
from tests.waiting import PATIENCE_S

WaitUntil = Callable[..., bool]

PROMPT = "def read(path):\n"
ENDLESS = {"max_tokens": 900, "end_id": -1, "num_draft_tokens": 0}  # a minute, at the slow pace
NUM_SLOTS, QUEUE_SIZE = 2, 3
SLOW_S = 0.07
INTERVAL_S = 0.12  # two chunks, at the slow pace


def write_faulty_repository(
    out: Path, built: Path, controls: Controls, **options: int | float
) -> Path:
    """The built repository with a pair that can be made to fail."""
    shutil.copytree(built, out, copy_function=os.link)
    speculative, postprocessing = (
        out / name / "1" / "model.py" for name in ("speculative", "postprocessing")
    )
    pair = speculative.with_name("pair.json")
    found = PairFile.read(pair)
    found = replace(found, options=replace(found.options, **options))
    texts = {
        pair: found.to_json(),
        speculative: f"{_IMPORT}faulty_pair.register({str(controls.folder)!r})\n"
        f"{speculative.read_text()}",
        postprocessing: f"{_IMPORT}{postprocessing.read_text()}\n"
        f"TritonPythonModel = faulty_pair.noting(TritonPythonModel, {str(controls.folder)!r})\n",
    }
    for path, text in texts.items():
        path.unlink()  # it is a link to the built one
        path.write_text(text)
    return out


_IMPORT = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import faulty_pair\n"


@pytest.fixture(scope="module")
def shared_controls(tmp_path_factory: pytest.TempPathFactory) -> Controls:
    return Controls(tmp_path_factory.mktemp("controls"))


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, quickstart_repository: Path, shared_controls: Controls
) -> Iterator[Server]:
    """Two requests at once, their chunks gathered, and three in the queue; no test may end one of
    its processes.
    """
    folder = write_faulty_repository(
        tmp_path_factory.mktemp("faulty") / "model_repo",
        quickstart_repository,
        shared_controls,
        max_batch_size=NUM_SLOTS,
        max_queue_size=QUEUE_SIZE,
        stream_interval_s=INTERVAL_S,
    )
    with launcher.running(folder) as running:
        yield running
    assert_clean_end(running)


@pytest.fixture
def controls(
    server: Server, shared_controls: Controls, wait_until: WaitUntil
) -> Iterator[Controls]:
    """The shared server's, quick and sound, with nothing to do; the diary starts anew."""

    def is_at_rest() -> bool:
        return num_in_flight(server) == 0 == shared_controls.num_sequences()

    assert wait_until(is_at_rest)
    (shared_controls.folder / "diary").unlink(missing_ok=True)
    yield shared_controls
    shared_controls.set(**dict.fromkeys(("pause", "raise", "nan", "hold", "holds_at_notice"), 0))


@pytest.fixture
def doomed(
    tmp_path: Path, quickstart_repository: Path
) -> Iterator[Callable[[], tuple[Server, Controls]]]:
    """Starts a server of the test's own, for it to break; each chunk is a response."""
    with ExitStack() as stack:

        def start() -> tuple[Server, Controls]:
            controls = Controls(tmp_path)
            folder = write_faulty_repository(
                tmp_path / "model_repo", quickstart_repository, controls, stream_interval_s=0.0
            )
            ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
            options = ServeOptions(**ports, drain_timeout_s=120)
            return stack.enter_context(launcher.running(folder, options)), controls

        yield start


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, server: Server) -> str:
    return server.http_url if request.param == "http" else server.grpc_url


def assert_clean_end(server: Server) -> None:
    """Triton found no request in flight when it was told to stop, and ended by itself."""
    log = server.triton.last_log_lines
    in_flight = [line for line in log if "that have in-flight inferences" in line]
    assert len(in_flight) == 1 and "Found 0 model versions" in in_flight[0], log[-20:]
    assert any("Found 0 live models" in line for line in log), log[-20:]


def waited_s(server: Server) -> int:
    """How long Triton said that it waits for something to end, by a line a second."""
    return sum(
        bool(re.search(r"Timeout \d+: Found", line)) for line in server.triton.last_log_lines
    )


def stream(url: str, prompt: str = PROMPT, **settings: Any) -> list[Completion]:
    with Client(url) as client:
        return list(client.stream(prompt, **settings))


def num_ended(server: Server, finish_reason: str) -> int:
    return int(metric(server, f'specpipe_requests_total{{finish_reason="{finish_reason}"}}'))


def num_in_flight(server: Server) -> int:
    return int(metric(server, "specpipe_requests_in_flight"))


def num_waiting(server: Server) -> int:
    """How many the pair has in its queue; one in flight may not have come there yet."""
    return int(metric(server, "specpipe_requests_waiting"))


def metric(server: Server, name: str) -> float:
    return metrics(server, f"{name} ")[name]


# Gathered chunks


def test_chunks_that_leave_together_say_what_each_would_have(
    url: str, server: Server, controls: Controls, wait_until: WaitUntil
) -> None:
    settings = {"max_tokens": 30, "num_draft_tokens": 0, "end_id": -1, "seed": 5}
    asked = {"return_log_probs": True, "num_top_log_probs": 2, "return_token_ids": True}
    gathered = "specpipe_gathered_chunks_total"
    before = metric(server, gathered)
    with Client(url) as client:
        whole = client.generate(PROMPT, **settings, **asked)
        assert metric(server, gathered) == before
    chunks = stream(url, **settings, **asked)
    assert 1 < len(chunks) < 30
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].statistics == whole.statistics
    for name in ("token_ids", "log_probs", "top_log_probs"):
        assert sum((getattr(chunk, name) for chunk in chunks), ()) == getattr(whole, name)
    # A page of metrics may be of a moment before the last chunk.
    assert wait_until(lambda: metric(server, gathered) - before == 30 - len(chunks))


# Cancellation


def test_a_cancelled_stream_frees_its_sequence_without_another_round(
    url: str, server: Server, controls: Controls, wait_until: WaitUntil
) -> None:
    """But for the one that runs when it is noticed."""
    before = num_ended(server, "cancelled")
    controls.set(pause=SLOW_S, holds_at_notice=1)
    with Client(url) as client:
        chunks = client.stream(PROMPT, **ENDLESS)
        for _ in range(3):
            next(chunks)
        assert controls.num_sequences() == 1
        chunks.close()
        assert wait_until(lambda: controls.num_sequences() == 0)
    diary = controls.diary()
    notice, freed = diary.index("noticed"), diary.index("freed")
    assert diary[notice:freed].count("forward") <= 1
    assert wait_until(lambda: num_ended(server, "cancelled") == before + 1)


def test_one_cancelled_stream_of_two_leaves_the_other_its_text(
    url: str, server: Server, controls: Controls
) -> None:
    settings = {"max_tokens": 40, "end_id": -1}
    alone = "".join(chunk.text for chunk in stream(url, **settings))
    controls.set(pause=SLOW_S)
    with Client(url) as client, ThreadPoolExecutor() as pool:
        chunks = client.stream(PROMPT, **ENDLESS)
        next(chunks)
        other = pool.submit(stream, url, **settings)
        next(chunks)
        chunks.close()
        assert "".join(chunk.text for chunk in other.result()) == alone


def test_a_direct_call_to_speculative_is_seen_to_cancel(
    server: Server, controls: Controls, wait_until: WaitUntil
) -> None:
    """Triton tells it there; postprocessing has no part in it."""
    before = num_ended(server, "cancelled")
    request = Request(request_id="", prompt_token_ids=(5, 6, 7), max_tokens=900)
    tensors = serving.Generation(request=request, stream=True).to_tensors(Signer(server.secret))
    controls.set(pause=SLOW_S)
    client = grpc.InferenceServerClient(server.grpc_url.removeprefix("grpc://"))
    received = threading.Semaphore(0)
    client.start_stream(lambda result, error: received.release())
    inputs = [
        infer_input(name, array, "BYTES" if array.dtype == np.object_ else "INT32")
        for name, array in tensors.items()
    ]
    client.async_stream_infer("speculative", inputs)
    assert received.acquire(timeout=PATIENCE_S)
    client.stop_stream(cancel_requests=True)
    client.close()
    assert wait_until(lambda: controls.diary().count("freed") == 1)
    assert "noticed" not in controls.diary()
    assert wait_until(lambda: num_ended(server, "cancelled") == before + 1)


def test_a_cancelled_request_in_the_queue_ends_with_its_first_chunks(
    url: str, server: Server, controls: Controls, wait_until: WaitUntil
) -> None:
    before = num_ended(server, "cancelled")
    controls.set(pause=SLOW_S)
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        running = [stack.enter_context(Client(url)).stream(PROMPT, **ENDLESS) for _ in range(2)]
        for chunks in running:
            next(chunks)
        with controls.held():
            with asked_by_hand(server, stream=True, **ENDLESS):
                assert wait_until(lambda: num_waiting(server) == 1)
            assert controls.diary().count("made") == NUM_SLOTS
        for chunks in running:
            pool.submit(chunks.close)
        assert wait_until(lambda: num_ended(server, "cancelled") == before + 3)
    assert controls.diary().count("made") == 3
    assert controls.num_sequences() == 0


def test_a_whole_request_that_nobody_waits_for_ends_with_its_timeout(
    server: Server, controls: Controls, wait_until: WaitUntil
) -> None:
    """Nothing of it reaches postprocessing before the end, so nobody can notice earlier."""
    cancelled, failed = num_ended(server, "cancelled"), num_ended(server, "error")
    controls.set(pause=SLOW_S)
    with asked_by_hand(server, stream=False, timeout_s=1.5, **ENDLESS):
        assert wait_until(lambda: "made" in controls.diary())
    assert wait_until(lambda: controls.num_sequences() == 0)
    assert wait_until(lambda: num_ended(server, "error") == failed + 1)
    assert num_ended(server, "cancelled") == cancelled


def test_a_client_that_stops_reading_holds_up_nobody(
    server: Server, controls: Controls, wait_until: WaitUntil
) -> None:
    before = num_ended(server, "length")
    with asked_by_hand(server, stream=True, **ENDLESS):
        assert wait_until(lambda: "made" in controls.diary())
        for url in (server.http_url, server.grpc_url):
            texts = [chunk.text for chunk in stream(url, max_tokens=20, end_id=-1)]
            assert len(texts) > 1
        # Triton takes what the client does not; the request ends and its memory is free.
        assert wait_until(lambda: controls.num_sequences() == 0)
        assert wait_until(lambda: num_ended(server, "length") == before + 3)


@contextmanager
def asked_by_hand(server: Server, *, stream: bool, **settings: Any) -> Iterator[None]:
    """Asks over HTTP and reads nothing of the answer; the connection is closed in the end."""
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        lazy.connect(("127.0.0.1", server.options.http_port))
        body = json.dumps({"text_input": PROMPT, "stream": stream, **settings}).encode()
        path = f"/v2/models/ensemble/generate{'_stream' if stream else ''}"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        lazy.sendall(head.encode() + body)
        yield


# Limits


def test_the_queue_is_limited_and_says_so_with_the_numbers(
    url: str, server: Server, controls: Controls, wait_until: WaitUntil
) -> None:
    controls.set(pause=SLOW_S)
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        running = [stack.enter_context(Client(url)).stream(PROMPT, **ENDLESS) for _ in range(2)]
        for chunks in running:
            next(chunks)
        settings = {"max_tokens": 8, "end_id": -1, "num_draft_tokens": 0}
        with controls.held(), Client(url) as client:
            waiting = [pool.submit(stream, url, **settings) for _ in range(QUEUE_SIZE)]
            message = (
                r"^the queue is full: 3 requests wait \(serving.max_queue_size\), 2 run; try again "
            )
            assert wait_until(lambda: num_waiting(server) == QUEUE_SIZE)
            for ask in (client.generate, lambda *a, **k: list(client.stream(*a, **k))):
                with pytest.raises(RequestError, match=message):
                    ask(PROMPT, max_tokens=1)
        for chunks in running:
            chunks.close()
        for future in waiting:
            statistics = future.result()[-1].statistics
            assert statistics is not None and statistics.num_output_tokens == 8


def test_what_runs_waits_and_is_cached_is_told_while_it_does(
    server: Server, controls: Controls, wait_until: WaitUntil
) -> None:
    """The engines hold 8 sequences of 1024 tokens; the pair that serves them runs two at once."""
    url = server.grpc_url
    cached = 'specpipe_kv_cache_tokens{role="target"}'
    controls.set(pause=SLOW_S)
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        asked = [stack.enter_context(Client(url)).stream(PROMPT, **ENDLESS) for _ in range(2)]
        for chunks in asked:
            next(chunks)
        asked.append(stack.enter_context(Client(url)).stream(PROMPT, **ENDLESS))
        with controls.held():
            waiting = pool.submit(next, asked[2])
            assert wait_until(lambda: num_waiting(server) == 1)
            assert wait_until(lambda: num_in_flight(server) == 3)
            assert metric(server, "specpipe_requests_running") == 2
            assert 12 <= metric(server, cached) < 2048
            for role in ("draft", "target"):
                assert metric(server, f'specpipe_kv_cache_capacity_tokens{{role="{role}"}}') == 8192
        asked[0].close()
        waiting.result()
        for chunks in asked[1:]:
            chunks.close()
    assert wait_until(lambda: num_in_flight(server) == 0)
    assert metrics(server, "specpipe_requests_", "specpipe_kv_cache_tokens") == {
        **metrics(server, "specpipe_requests_total"),
        "specpipe_requests_in_flight": 0,
        "specpipe_requests_running": 0,
        "specpipe_requests_waiting": 0,
        'specpipe_kv_cache_tokens{role="draft"}': 0,
        cached: 0,
    }


def test_priority_goes_first_in_the_queue(
    server: Server, controls: Controls, wait_until: WaitUntil
) -> None:
    url = server.http_url
    controls.set(pause=SLOW_S)
    order: list[int] = []

    def ask(priority: int) -> None:
        with Client(url) as client:
            chunks = client.stream(PROMPT, priority=priority, **ENDLESS)
            next(chunks)
            order.append(priority)  # before it leaves its slot to the next one
            chunks.close()

    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        running = [stack.enter_context(Client(url)).stream(PROMPT, **ENDLESS) for _ in range(2)]
        for chunks in running:
            next(chunks)
        with controls.held():
            for count, priority in enumerate((5, 1, 3), 1):
                pool.submit(ask, priority)
                assert wait_until(lambda wanted=count: num_waiting(server) == wanted)
        running[0].close()  # one slot for the three of them, one after the other
        pool.shutdown()
        running[1].close()
    assert order == [1, 3, 5]


def test_a_timeout_ends_a_running_stream_with_its_text_and_the_reason(
    url: str, controls: Controls
) -> None:
    controls.set(pause=SLOW_S)
    texts = []
    with (
        Client(url) as client,
        pytest.raises(ServerError, match="the request failed: the request ran into its time limit"),
    ):
        for chunk in client.stream(PROMPT, timeout_s=2.0, **ENDLESS):
            texts.append(chunk.text)  # noqa: PERF401
    assert texts
    assert controls.num_sequences() == 0


def test_a_timeout_ends_a_waiting_request_before_it_starts(url: str, controls: Controls) -> None:
    controls.set(pause=SLOW_S)
    with ExitStack() as stack:
        running = [stack.enter_context(Client(url)).stream(PROMPT, **ENDLESS) for _ in range(2)]
        for chunks in running:
            next(chunks)
        with (
            Client(url) as client,
            pytest.raises(RequestError, match=r"^the request waited \d+\.\d s without being "),
        ):
            client.generate(PROMPT, max_tokens=1, timeout_s=0.3)
        for chunks in running:
            chunks.close()
    assert controls.diary().count("made") == NUM_SLOTS


def test_tritons_own_timeout_is_taken_over(server: Server, controls: Controls) -> None:
    """Triton's queue never holds a request here, so what gRPC clients set for it acts in ours."""
    controls.set(pause=SLOW_S)
    client = grpc.InferenceServerClient(server.grpc_url.removeprefix("grpc://"))
    results: list[tuple[Any, Any]] = []
    is_done = threading.Event()

    def receive(result: Any, error: Any) -> None:
        results.append((result, error))
        last = result.get_response().parameters["triton_final_response"].bool_param
        if error is not None or last:
            is_done.set()

    client.start_stream(receive)
    client.async_stream_infer(
        "ensemble", inputs(text_input=PROMPT, stream=True, **ENDLESS), timeout=2_000_000
    )
    assert is_done.wait(PATIENCE_S)
    client.stop_stream()
    client.close()
    assert len(results) > 1
    error = results[-1][0].as_numpy("error").item().decode()
    assert error.startswith("the request ran into its time limit")


# Engines that fail


def test_a_nan_ends_its_request_with_the_earlier_text_and_nothing_stays(
    url: str, server: Server, controls: Controls, wait_until: WaitUntil
) -> None:
    settings = {"max_tokens": 30, "num_draft_tokens": 0, "end_id": -1}
    whole = [chunk.text for chunk in stream(url, **settings)]
    controls.set(nan=3)
    texts = []
    with Client(url) as client:
        with pytest.raises(ServerError, match="^the request failed: .* NaN"):
            for chunk in client.stream(PROMPT, **settings):
                texts.append(chunk.text)  # noqa: PERF401
        assert texts and "".join(whole).startswith("".join(texts))
        assert controls.num_sequences() == 0
        assert "".join(chunk.text for chunk in client.stream(PROMPT, **settings)) == "".join(whole)


def test_an_engine_that_dies_at_the_third_chunk(
    doomed: Callable[[], tuple[Server, Controls]], wait_until: WaitUntil
) -> None:
    server, controls = doomed()
    settings = {"max_tokens": 30, "num_draft_tokens": 0, "end_id": -1}
    whole = [chunk.text for chunk in stream(server.grpc_url, **settings)]
    controls.set(**{"raise": 3})
    message = "the draft-verify loop failed: RuntimeError: CUDA error: an illegal memory access"
    texts = []
    with Client(server.grpc_url) as client:
        with pytest.raises(ServerError, match=f"^the request failed: {message}"):
            for chunk in client.stream(PROMPT, **settings):
                texts.append(chunk.text)  # noqa: PERF401
        assert "".join(texts) == "".join(whole[:2])
        assert wait_until(server.triton.has_lost_model)
        # The loop's process is gone: later requests fail, they do not hang.
        with pytest.raises(SpecpipeError, match="(?i)stub process"):
            client.generate(PROMPT, max_tokens=1)
    assert num_in_flight(server) == 0
    server.stop()
    assert waited_s(server) < 60


def test_a_killed_model_process_is_not_waited_for_at_the_end(
    doomed: Callable[[], tuple[Server, Controls]], wait_until: WaitUntil
) -> None:
    server, controls = doomed()
    controls.set(pause=SLOW_S)
    with Client(server.grpc_url) as client:
        chunks = client.stream(PROMPT, **ENDLESS)
        next(chunks)
        os.kill(model_process(controls), signal.SIGKILL)
        with ThreadPoolExecutor() as pool:
            rest = pool.submit(list, chunks)
            server.stop()
            with pytest.raises(SpecpipeError):
                rest.result(timeout=PATIENCE_S)
    # Triton itself would have waited for its request until the drain limit of 120 s.
    assert 0 < waited_s(server) < 60


def test_a_triton_that_is_killed_ends_generate_at_once_with_its_text(
    doomed: Callable[[], tuple[Server, Controls]],
) -> None:
    server, controls = doomed()
    whole = "".join(chunk.text for chunk in stream(server.grpc_url, max_tokens=200))
    controls.set(pause=0.5)  # far more for the whole answers than until both have begun
    asking = [start_generate(url) for url in server.urls]
    with ThreadPoolExecutor() as pool:
        begun = [process.stdout.read(1) for process in asking if process.stdout is not None]
        assert server.triton._process is not None
        os.kill(server.triton._process.pid, signal.SIGKILL)
        rests = list(pool.map(lambda process: process.communicate(timeout=PATIENCE_S), asking))
    for url, process, first, (rest, errors) in zip(server.urls, asking, begun, rests, strict=True):
        assert process.returncode == 1
        assert rest.endswith("\n")
        partial = first + rest[:-1]
        assert whole.startswith(partial) and len(partial) < len(whole)
        assert re.fullmatch(
            f"Error: {url} broke off: [a-z ]+, after \\d+ responses? and without the end of the "
            "answer; ask again, or see the server's log\n",
            errors,
        )


def test_sigterm_lets_grpc_streams_that_run_and_that_wait_finish(
    doomed: Callable[[], tuple[Server, Controls]], wait_until: WaitUntil
) -> None:
    """With HTTP see test_launcher.py; Triton by itself drains those alone."""
    server, controls = doomed()
    prompts = [f"def f{number}(x):\n" for number in range(12)]
    settings = {"max_tokens": 24, "end_id": -1}
    alone = {
        prompt: "".join(chunk.text for chunk in stream(server.http_url, prompt, **settings))
        for prompt in prompts
    }
    num_before = controls.diary().count("made")
    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        with controls.held():
            answers = {
                prompt: pool.submit(stream, server.grpc_url, prompt, **settings)
                for prompt in prompts
            }
            assert wait_until(lambda: num_waiting(server) == len(prompts) - 8)
            assert controls.diary().count("made") - num_before == 8
            stopping = pool.submit(server.stop)
            assert wait_until(lambda: any("Signal (15)" in x for x in server.triton.last_log_lines))
        stopping.result()
        texts = {
            prompt: "".join(chunk.text for chunk in answer.result())
            for prompt, answer in answers.items()
        }
    assert texts == alone
    assert_clean_end(server)


def test_an_idle_connection_does_not_hold_up_the_end(
    doomed: Callable[[], tuple[Server, Controls]],
) -> None:
    server, _ = doomed()
    connection = http.client.HTTPConnection("127.0.0.1", server.options.http_port)
    connection.request("GET", "/v2/health/ready")
    assert connection.getresponse().status == 200
    server.stop()
    connection.close()
    assert 0 < waited_s(server) < 60  # of the 120 s that Triton itself would wait for the client


def test_a_log_that_cannot_be_written_stops_nothing(echo_repository: Callable[..., Path]) -> None:
    def fail(line: str) -> None:
        raise BrokenPipeError

    with launcher.running(echo_repository(), log=fail) as server:
        assert stream(server.http_url, "a b", max_tokens=2)[-1].finish_reason == "length"
        assert server.triton.last_log_lines


def start_generate(url: str) -> subprocess.Popen[str]:
    words = ["generate", PROMPT, "--stream", "--max-tokens", "200", "--num-draft-tokens", "0"]
    words += ["--url", url]
    command = [sys.executable, "-c", "from specpipe.cli.group import main; main()", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def model_process(controls: Controls) -> int:
    """The id of the process of the model `speculative`."""
    return next(int(line.split(":")[1]) for line in controls.diary() if ":" in line)


# Inputs that no client of ours would send


def infer_input(name: str, array: Any, dtype: str) -> grpc.InferInput:
    made = grpc.InferInput(name, array.shape, dtype)
    made.set_data_from_numpy(array)
    return made


def inputs(**values: Any) -> list[grpc.InferInput]:
    made = []
    for name, value in values.items():
        tensor = serving.input_tensor(name)
        is_text = tensor.dtype == "STRING"
        array = serving.as_array(tensor, [value.encode() if is_text else value])
        made.append(infer_input(name, array, "BYTES" if is_text else tensor.dtype))
    return made


def raw_stream(server: Server, tensors: list[grpc.InferInput], **settings: Any) -> str:
    """The error of a request as it stands, "" without one."""
    client = grpc.InferenceServerClient(server.grpc_url.removeprefix("grpc://"))
    results: list[tuple[Any, Any]] = []
    is_done = threading.Event()

    def receive(result: Any, error: Any) -> None:
        results.append((result, error))
        is_done.set()

    client.start_stream(receive)
    client.async_stream_infer("ensemble", tensors, enable_empty_final_response=True, **settings)
    assert is_done.wait(PATIENCE_S)
    client.stop_stream()
    client.close()
    return "" if results[0][1] is None else str(results[0][1].message())


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (list, "request has 0 inputs"),
        (lambda: inputs(text_input="a"), "max_tokens is missing: say how many tokens"),
        (lambda: inputs(max_tokens=3), "input_ids and messages: exactly one is needed, none was"),
        (
            lambda: [*inputs(text_input="a"), infer_input("max_tokens", np.ones((1, 1)), "FP64")],
            "max_tokens.*FP64",
        ),
        (
            lambda: [
                *inputs(text_input="a"),
                infer_input("max_token", np.ones((1, 1), np.int32), "INT32"),
            ],
            "unexpected inference input 'max_token'",
        ),
        (
            lambda: [
                *inputs(text_input="a"),
                infer_input("max_tokens", np.ones((1, 2), np.int32), "INT32"),
            ],
            "max_tokens",
        ),
        (
            lambda: [
                infer_input("text_input", np.array([[b"a"], [b"b"]], object), "BYTES"),
                infer_input("max_tokens", np.ones((2, 1), np.int32), "INT32"),
            ],
            "batch-size must be <= 1",
        ),
        (
            lambda: [
                infer_input("text_input", np.array([[b"\xff\xfe"]], object), "BYTES"),
                *inputs(max_tokens=3),
            ],
            "text_input is not UTF-8",
        ),
        (
            lambda: inputs(messages="[1]", max_tokens=3),
            r'messages\[0\] must be an object with a "role"',
        ),
    ],
)
def test_grpc_refuses_missing_and_mistyped_inputs_by_name(
    server: Server, tensors: Callable[[], list[grpc.InferInput]], expected: str
) -> None:
    message = raw_stream(server, tensors())
    assert re.search(expected, message), message


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"temprature": "1"}, "unknown request parameter 'temprature': did you mean 'temperatur"),
        ({"max_tokens": 3}, "max_tokens is an input: send it beside text_input"),
        ({"zzz": True}, "unknown request parameter 'zzz': leave it out"),
    ],
)
def test_grpc_refuses_unknown_parameters(
    server: Server, parameters: dict[str, Any], expected: str
) -> None:
    message = raw_stream(server, inputs(text_input="a", max_tokens=3), parameters=parameters)
    assert expected in message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"text_input": "a", "max_tokens": "three"}',
        b'{"text_input": "a", "max_tokens": 3.5}',
        b'{"text_input": 7, "max_tokens": 3}',
        b'{"text_input": "a", "max_tokens": 99999999999}',
        b'{"text_input": "a", "max_tokens": 3, "stream": "yes"}',
        b'{"text_input": "a", "max_tokens": 3, "seed": -1}',
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}',
        b'{"text_input": "a", "max_tokens": 3, "temperature": null}',
    ],
)
def test_http_refuses_mistyped_values_and_goes_on(server: Server, body: bytes) -> None:
    request = urllib.request.Request(
        f"{server.http_url}/v2/models/ensemble/generate", body, method="POST"
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=PATIENCE_S)
    with caught.value as response:
        assert response.code in (400, 500)
        assert json.loads(response.read())["error"]
    with Client(server.http_url) as client:
        assert client.generate(PROMPT, max_tokens=1).finish_reason == "length"
