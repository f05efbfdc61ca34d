"""NVIDIA's tritonclient over gRPC, decoupled: chunks as they come, until the final response.

python examples/triton_grpc_stream.py [127.0.0.1:8001]
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
    tensor("stream", "BOOL", np.array([[True]])),
]

results: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
with grpc.InferenceServerClient(address) as client:
    client.start_stream(lambda result, error: results.put((result, error)))
    client.async_stream_infer("ensemble", inputs, enable_empty_final_response=True)
    is_final = False
    while not is_final:
        result, error = results.get(timeout=60)
        if error is not None:
            raise SystemExit(f"refused: {error}")
        response = result.get_response()
        if response.outputs:
            print(result.as_numpy("text_output").item().decode(), end="", flush=True)
        is_final = response.parameters["triton_final_response"].bool_param
    client.stop_stream()
print()
