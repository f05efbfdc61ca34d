from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from specpipe.errors import ServerError
from specpipe.evaluate.bench.counters import (
    acceptance,
    gained,
    late_work,
    read_counters,
    read_settled,
)
from specpipe.machine.prometheus import Samples, parse_samples, total

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m, {x}"} 8.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m, {x}"} 16.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m, {x}"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m, {x}",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m, {x}",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_created{engine="0",model_name="m, {x}"} 1.7e+09
"""


Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves texts as metrics, one after the other, the last one for good."""
    with contextlib.ExitStack() as stack:

        def start(*texts: str) -> str:
            left = list(texts)

            class Handler(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write((left.pop(0) if len(left) > 1 else left[0]).encode())

                def log_message(self, *_: object) -> None: ...

            server = stack.enter_context(HTTPServer(("127.0.0.1", 0), Handler))
            thread = Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}/metrics"

        yield start


def ours(num_in_flight: int, num_draft_tokens: int) -> str:
    return (
        f"specpipe_requests_in_flight {num_in_flight}\n"
        f"specpipe_draft_tokens_total {num_draft_tokens}\n"
    )


def samples(values: dict[str, float]) -> Samples:
    return parse_samples("".join(f"{sample} {value}\n" for sample, value in values.items()))


def test_vllms_counters_tell_acceptance_and_its_positions(serve: Serve) -> None:
    """16 drafted and 9 accepted in 8 steps; 6 and 3 steps accepted a first and second token."""
    assert acceptance(read_counters(serve(VLLM))) == {
        "rate": 0.5625,
        "length": 2.125,
        "per_position": [0.75, 0.375],
        "histogram": None,
        "num_draft_tokens": 16,
        "num_accepted_tokens": 9,
        "num_steps": 8,
    }


def test_our_counters_know_how_often_a_position_was_drafted() -> None:
    """An adaptive K drafts a second token seldom: 4 times, of which 3 were accepted."""
    grown = {
        "specpipe_draft_tokens_total": 14.0,
        "specpipe_accepted_draft_tokens_total": 8.0,
        "specpipe_request_steps_total": 20.0,
        'specpipe_draft_tokens_by_position_total{position="1"}': 10.0,
        'specpipe_draft_tokens_by_position_total{position="2"}': 4.0,
        'specpipe_draft_tokens_by_position_total{position="3"}': 0.0,
        'specpipe_accepted_draft_tokens_by_position_total{position="1"}': 5.0,
        'specpipe_accepted_draft_tokens_by_position_total{position="2"}': 3.0,
        'specpipe_accepted_draft_tokens_by_position_total{position="3"}': 0.0,
    }
    found = acceptance(samples(grown))
    assert found is not None
    assert (found["length"], found["per_position"]) == (1.4, [0.5, 0.75])


def test_ours_are_read_once_all_requests_are_counted(serve: Serve) -> None:
    """The answers are there, and two requests are counted a moment later."""
    reports: list[str] = []
    found = read_settled(serve(ours(2, 4), ours(1, 8), ours(0, 12)), report=reports.append)
    assert found == samples(
        {"specpipe_requests_in_flight": 0.0, "specpipe_draft_tokens_total": 12.0}
    )
    assert reports == []


def test_a_server_that_others_ask_is_not_waited_for_without_end(serve: Serve) -> None:
    reports: list[str] = []
    url = serve(ours(3, 4))
    found = read_settled(url, report=reports.append, timeout_s=0.05)
    assert total(found, "specpipe_draft_tokens_total") == 4.0
    assert reports == [
        f"warning: {url}: 3 requests are still in flight after 0.05 s, so the server's counters "
        "may hold what others ask it, and lack what was asked here"
    ]


def test_other_servers_are_read_as_they_are(serve: Serve) -> None:
    running = 'vllm:num_requests_running{engine="0"} 5.0\n'
    found = read_settled(serve(running, VLLM), report=lambda line: None)
    assert found == samples({'vllm:num_requests_running{engine="0"}': 5.0})


def test_a_load_is_what_counters_gained() -> None:
    before, after = samples({"a": 2.0, "gone": 1.0}), samples({"a": 5.0, "b": 3.0})
    assert gained(before, after) == samples({"a": 3.0, "b": 3.0})


def test_what_made_requests_wait_is_told() -> None:
    names = [
        f"specpipe_{name}_after_ready_total" for name in ("kernel_compilations", "graph_recordings")
    ]
    assert late_work(samples(dict.fromkeys(names, 0.0))) is None
    found = late_work(samples(dict(zip(names, (3.0, 1.0), strict=True))))
    assert found == "3 kernels were compiled and 1 launches recorded while requests waited"


@pytest.mark.parametrize("grown", [{}, {"nv_inference_count": 3.0}])
def test_other_servers_tell_nothing(grown: dict[str, float]) -> None:
    assert acceptance(samples(grown)) is None


def test_several_engines_are_added_up() -> None:
    found = acceptance(
        samples(
            {
                'vllm:spec_decode_num_draft_tokens_total{engine="0"}': 4.0,
                'vllm:spec_decode_num_draft_tokens_total{engine="1"}': 4.0,
                'vllm:spec_decode_num_accepted_tokens_total{engine="0"}': 1.0,
                'vllm:spec_decode_num_accepted_tokens_total{engine="1"}': 3.0,
                'vllm:spec_decode_num_drafts_total{engine="0"}': 2.0,
                'vllm:spec_decode_num_drafts_total{engine="1"}': 2.0,
            }
        )
    )
    assert found is not None
    assert (found["rate"], found["length"], found["per_position"]) == (0.5, 2.0, None)


def test_a_metrics_endpoint_that_is_not_there_is_told() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
        with pytest.raises(ServerError, match=f"^{url} does not answer with metrics: "):
            read_counters(url)


@pytest.mark.parametrize("page", ["", '{"name": "ensemble"}', "# HELP a\n"])
def test_a_page_without_metrics_is_told(serve: Serve, page: str) -> None:
    with pytest.raises(ServerError, match="does not answer with metrics: what it sends has none$"):
        read_counters(serve(page))
