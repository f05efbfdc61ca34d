"""What Triton adds to one stream, and what several streams gain, on the same prompts in one run.

    python benchmarks/serve.py --config configs/quickstart.yaml --streams 8

The built pair runs in this process and behind a Triton that this script starts, with the same
number of threads; greedy, answers streamed over gRPC. One stream runs in turn in process and
through Triton, prompt by prompt; then all prompts run through Triton with several streams at once.
Client, server and models share the cores, and nothing else should keep them busy.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from command import cpu_name, run_command
from measure import (
    PROMPTS,
    QUICKSTART,
    Prompt,
    ask,
    load_pair,
    load_tokenizer,
    read_prompts,
)

from specpipe.build.load import load_config
from specpipe.build.repositories import built_repository
from specpipe.triton.client import Client
from specpipe.triton.server import launcher


def main() -> None:
    arguments = parse_arguments()
    config = load_config(arguments.config)
    tokenizer = load_tokenizer(config)
    prompts = read_prompts(arguments.prompts, arguments.limit)
    pair = load_pair(config, tokenizer)
    with launcher.running(built_repository(config)) as server:
        client = Client(server.grpc_url)

        def stream(prompt: Prompt, url_client: Client = client) -> tuple[int, float]:
            """Output tokens and the seconds to the first chunk."""
            start = time.perf_counter()
            arrivals = []
            for chunk in url_client.stream(
                prompt.prompt,
                max_tokens=arguments.max_tokens,
                num_draft_tokens=arguments.num_draft_tokens,
            ):
                arrivals.append(time.perf_counter() - start)
                last = chunk
            assert last.statistics is not None
            return last.statistics.num_output_tokens, arrivals[0]

        ask(pair, tokenizer, tokenizer.encode(prompts[0].prompt), 16)
        stream(prompts[0])
        in_process = through_triton = 0.0
        num_tokens = 0
        first_chunks = []
        for prompt in prompts:
            run = ask(
                pair,
                tokenizer,
                tokenizer.encode(prompt.prompt),
                arguments.max_tokens,
                arguments.num_draft_tokens,
            )
            in_process += run.seconds
            start = time.perf_counter()
            num_streamed, first = stream(prompt)
            through_triton += time.perf_counter() - start
            assert num_streamed == len(run.token_ids)
            num_tokens += num_streamed
            first_chunks.append(first)
        start = time.perf_counter()
        with ThreadPoolExecutor(arguments.streams) as pool:
            total = sum(tokens for tokens, _ in pool.map(stream, prompts))
        together = time.perf_counter() - start
        client.close()
    print(
        f"{cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s) for the models;"
        f" pair {config.name}, greedy,\n{len(prompts)} prompts of {arguments.prompts.name}, up to "
        f"{arguments.max_tokens} tokens, streamed over gRPC, torch {torch.__version__}\n"
    )
    print(f"in process, one stream       {num_tokens / in_process:8.0f} tokens/s")
    print(f"Triton, one stream           {num_tokens / through_triton:8.0f} tokens/s")
    print(f"Triton, {arguments.streams:2} streams           {total / together:8.0f} tokens/s")
    print(f"Triton adds to one stream    {through_triton / in_process - 1:8.1%}")
    gain = (total / together) / (num_tokens / through_triton)
    print(f"{arguments.streams} streams / one             {gain:8.2f}")
    print(f"median time to first chunk   {sorted(first_chunks)[len(prompts) // 2] * 1e3:8.1f} ms")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--limit", type=int, help="use the first prompts only")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-draft-tokens", type=int, help="left out: what was packaged")
    parser.add_argument("--streams", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    run_command(main)
