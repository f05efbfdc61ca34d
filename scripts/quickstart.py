"""Serves the quickstart pair, asks it as any client would, and says what speculation gained.

Run by `make quickstart` after `specpipe build --config configs/quickstart.yaml`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from specpipe.config import load_config
from specpipe.pipeline import built_repository
from specpipe.triton import launcher
from specpipe.triton.client import Client

ROOT = Path(__file__).parents[1]
PROMPTS = (
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
    "import os\nimport sys\n\ndef main():\n",
    "def read_json(path):\n    with open(path) as file:\n",
)
MAX_TOKENS = 128
NUM_ROUNDS = 3


@dataclass
class Total:
    """What some requests took and gave."""

    seconds: float = 0.0
    output_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


def main() -> None:
    repository = built_repository(load_config(ROOT / "configs" / "quickstart.yaml"))
    print("starting Triton ...", flush=True)
    with launcher.running(repository) as server, Client(server.grpc_url) as client:
        print(f"ready at {server.grpc_url}\n\n--- a streamed request over gRPC")
        print(PROMPTS[0], end="")
        for chunk in client.stream(PROMPTS[0], max_tokens=48):
            print(chunk.text, end="", flush=True)

        print("\n\n--- a whole request over HTTP")
        with Client(server.http_url) as http_client:
            print(PROMPTS[1] + http_client.generate(PROMPTS[1], max_tokens=48).text)

        print(f"\n--- {len(PROMPTS)} prompts, {MAX_TOKENS} tokens each, greedy, one at a time")
        alone, speculative = compare(client)
    for name, total in (("target alone", alone), ("speculative", speculative)):
        print(f"{name:14} {total.output_tokens / total.seconds:7.0f} tokens/s")
    print(f"ratio          {rate(speculative) / rate(alone):7.2f}")
    print(f"acceptance rate {speculative.accepted / max(speculative.drafted, 1):.2f}, ", end="")
    print(f"acceptance length {1 + speculative.accepted / speculative.steps:.2f}")


def compare(client: Client) -> tuple[Total, Total]:
    """Runs every prompt with and without speculation in turn; the answers must be the same."""
    alone, speculative = Total(), Total()
    client.generate(PROMPTS[0], max_tokens=8)
    for _ in range(NUM_ROUNDS):
        for prompt in PROMPTS:
            texts = [
                measure(client, prompt, total, num_draft_tokens)
                for total, num_draft_tokens in ((alone, 0), (speculative, None))
            ]
            if texts[0] != texts[1]:
                raise SystemExit(f"speculation changed the answer to {prompt!r}")
    return alone, speculative


def measure(client: Client, prompt: str, total: Total, num_draft_tokens: int | None) -> str:
    """Adds one request to a total and returns its text."""
    start = time.perf_counter()
    answer = client.generate(prompt, max_tokens=MAX_TOKENS, num_draft_tokens=num_draft_tokens)
    total.seconds += time.perf_counter() - start
    assert answer.statistics is not None
    total.output_tokens += answer.statistics.num_output_tokens
    total.steps += answer.statistics.num_steps
    total.drafted += answer.statistics.total_draft_tokens
    total.accepted += answer.statistics.total_accepted_draft_tokens
    return answer.text


def rate(total: Total) -> float:
    """Output tokens per second."""
    return total.output_tokens / total.seconds


if __name__ == "__main__":
    main()
