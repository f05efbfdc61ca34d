"""NVIDIA's tritonclient over HTTP: is the model ready, and what does it take; then an answer.

The ensemble is decoupled, since it streams, and Triton takes no `infer` over HTTP for such models.
Their way over HTTP is the generate extension, a plain POST for which tritonclient has no call.

python examples/triton_http.py [127.0.0.1:8000]
"""

from __future__ import annotations

import json
import sys
import urllib.request

from tritonclient import http

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8000"

with http.InferenceServerClient(address) as client:
    assert client.is_model_ready("ensemble")
    inputs = client.get_model_metadata("ensemble")["inputs"]
print("inputs:", ", ".join(sorted(tensor["name"] for tensor in inputs)))

body = {"text_input": "def fibonacci(n):", "max_tokens": 32, "stop_words": ["\n\n"]}
request = urllib.request.Request(
    f"http://{address}/v2/models/ensemble/generate",
    data=json.dumps(body).encode(),
    headers={"Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as response:
    answer = json.load(response)
print(answer["text_output"])
print("finished by:", answer["finish_reason"])
