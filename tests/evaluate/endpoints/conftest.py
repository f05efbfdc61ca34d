"""A real Triton: our ensemble around a pair that repeats its prompt, and a model with the face of
NVIDIA's ensemble.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specpipe.triton.server import launcher
from specpipe.triton.server.server import Server
from tests.triton.conftest import write_echo_repository

_NVIDIAS_CONFIG = """
name: "nvidias"  backend: "python"  max_batch_size: 1
model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: 1 }
input { name: "max_tokens" data_type: TYPE_INT32 dims: 1 }
input { name: "end_id" data_type: TYPE_INT32 dims: 1 optional: true }
input { name: "stop_words" data_type: TYPE_STRING dims: -1 optional: true }
input { name: "stream" data_type: TYPE_BOOL dims: 1 optional: true }
input { name: "return_num_input_tokens" data_type: TYPE_BOOL dims: 1 optional: true }
input { name: "return_num_output_tokens" data_type: TYPE_BOOL dims: 1 optional: true }
input { name: "return_perf_metrics" data_type: TYPE_BOOL dims: 1 optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: -1 }
output { name: "num_input_tokens" data_type: TYPE_INT32 dims: 1 }
output { name: "num_output_tokens" data_type: TYPE_INT32 dims: 1 }
output { name: "total_draft_tokens" data_type: TYPE_INT32 dims: 1 }
output { name: "total_accepted_draft_tokens" data_type: TYPE_INT32 dims: 1 }
instance_group { count: 1 kind: KIND_CPU }
"""

_NVIDIAS_MODEL = '''
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Sends "a", "bb" and "c" as 1, 2 and 1 tokens, each response with its own count."""

    def execute(self, requests):
        for request in requests:
            def given(name):
                tensor = pb_utils.get_input_tensor_by_name(request, name)
                return tensor is not None and bool(tensor.as_numpy()[0][0])
            sender = request.get_response_sender()
            assert given("stream")
            for text, count in (("a", 1), ("bb", 2), ("c", 1)):
                tensors = [pb_utils.Tensor("text_output", np.array([[text]], dtype=np.object_))]
                counts = {}
                if given("return_num_input_tokens"):
                    counts["num_input_tokens"] = 9
                if given("return_num_output_tokens"):
                    counts["num_output_tokens"] = count
                if given("return_perf_metrics") and text == "c":
                    counts |= {"total_draft_tokens": 6, "total_accepted_draft_tokens": 2}
                for name, value in counts.items():
                    tensors.append(pb_utils.Tensor(name, np.array([[value]], dtype=np.int32)))
                sender.send(pb_utils.InferenceResponse(tensors))
            sender.send(flags=FINAL)
'''


@pytest.fixture(scope="session")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Triton with the models `ensemble`, `nvidias` and `plain`, which cannot stream."""
    folder = write_echo_repository(tmp_path_factory.mktemp("echo") / "model_repo")
    version: Path = folder / "nvidias" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(_NVIDIAS_CONFIG)
    (version / "model.py").write_text(_NVIDIAS_MODEL)
    with launcher.running(folder) as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, echo_server: Server) -> str:
    """The server's address, by each protocol."""
    return echo_server.http_url if request.param == "http" else echo_server.grpc_url
