from __future__ import annotations

import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from specpipe.bench.counters import acceptance, gained, read_counters
from specpipe.errors import ServerError

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


@pytest.fixture
def metrics_url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(VLLM.encode())

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    thread.join()
    server.server_close()


def test_vllms_counters_tell_acceptance_and_its_positions(metrics_url: str) -> None:
    """16 drafted and 9 accepted in 8 steps; 6 and 3 steps accepted a first and second token."""
    assert acceptance(read_counters(metrics_url)) == {
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
    found = acceptance(grown)
    assert found is not None
    assert (found["length"], found["per_position"]) == (1.4, [0.5, 0.75])


def test_a_load_is_what_counters_gained() -> None:
    assert gained({"a": 2.0, "gone": 1.0}, {"a": 5.0, "b": 3.0}) == {"a": 3.0, "b": 3.0}


@pytest.mark.parametrize("grown", [{}, {"nv_inference_count": 3.0}])
def test_other_servers_tell_nothing(grown: dict[str, float]) -> None:
    assert acceptance(grown) is None


def test_several_engines_are_added_up() -> None:
    found = acceptance(
        {
            'vllm:spec_decode_num_draft_tokens_total{engine="0"}': 4.0,
            'vllm:spec_decode_num_draft_tokens_total{engine="1"}': 4.0,
            'vllm:spec_decode_num_accepted_tokens_total{engine="0"}': 1.0,
            'vllm:spec_decode_num_accepted_tokens_total{engine="1"}': 3.0,
            'vllm:spec_decode_num_drafts_total{engine="0"}': 2.0,
            'vllm:spec_decode_num_drafts_total{engine="1"}': 2.0,
        }
    )
    assert found is not None
    assert (found["rate"], found["length"], found["per_position"]) == (0.5, 2.0, None)


def test_a_metrics_endpoint_that_is_not_there_is_told() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
        with pytest.raises(ServerError, match=f"^{url} does not answer with metrics: "):
            read_counters(url)
