"""specpipe's own client: a whole answer over HTTP or gRPC, then a streamed one.

python examples/client.py [http://127.0.0.1:8000 | grpc://127.0.0.1:8001]
"""

from __future__ import annotations

import sys

from specpipe import Client, RequestError

url = sys.argv[1] if len(sys.argv) > 1 else "grpc://127.0.0.1:8001"

with Client(url) as client:
    answer = client.generate("def fibonacci(n):", max_tokens=32)
    print(answer.text)
    print("finished by:", answer.finish_reason)
    print(answer.statistics)

    for chunk in client.stream("import os\n", max_tokens=32, temperature=0.8, seed=7):
        print(chunk.text, end="", flush=True)
    print()

    try:
        client.generate("def fibonacci(n):", max_tokens=32, temperature=-1.0)
    except RequestError as error:
        print("refused:", error)
