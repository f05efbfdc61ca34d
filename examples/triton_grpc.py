"""NVIDIA's tritonclient over gRPC: a whole answer, as one response.

The ensemble is decoupled, since it streams, so a request goes through gRPC's stream even where one
response is asked for.

python examples/triton_grpc.py [127.0.0.1:8001]
"""

from __future__ import annotations

import queue
import sys
from typing import Any

import numpy as np
from tritonclient import grpc


def tensor(name: str, dtype: str, array: np.ndarray[Any, Any]) -> grpc.InferInput:
    made = grpc.InferInput(name, array.shape, dtype)
    made.set_data_from_numpy(array)
    return made


address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"
inputs = [
    tensor("text_input", "BYTES", np.array([[b"def fibonacci(n):"]], dtype=object)),
    tensor("max_tokens", "INT32", np.array([[32]], dtype=np.int32)),
    tensor("num_draft_tokens", "INT32", np.array([[4]], dtype=np.int32)),
]

results: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
with grpc.InferenceServerClient(address) as client:
    client.start_stream(lambda result, error: results.put((result, error)))
    client.async_stream_infer("ensemble", inputs)
    result, error = results.get(timeout=60)
    client.stop_stream()
if error is not None:
    raise SystemExit(f"refused: {error}")
print(result.as_numpy("text_output").item().decode())
print("finished by:", result.as_numpy("finish_reason").item().decode())
print("accepted:", result.as_numpy("total_accepted_draft_tokens").item())
