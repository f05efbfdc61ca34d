"""The quickstart pair, built and served: speculation changes the time, not the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load.closed_loop import Load
from benchmarks.load.sides import Point, Process
from benchmarks.load.through_triton import ThroughTriton
from benchmarks.load.worker import Measurements
from specpipe.errors import RequestError
from specpipe.runtimes.pair_file import PairFile
from specpipe.runtimes.runtime import load_runtime
from specpipe.speculative.request import Request
from specpipe.text.tokenizer import Tokenizer
from specpipe.triton.client import Client
from specpipe.triton.repository import lint
from specpipe.triton.server.server import Server
from tests.triton.asking import texts

ROOT = Path(__file__).parents[2]
PROMPTS = [
    json.loads(line)["prompt"]
    for line in (ROOT / "benchmarks" / "prompts.jsonl").read_text().splitlines()
]
GREEDY = {"max_tokens": 24}
SEEDED = {"max_tokens": 24, "temperature": 0.8, "top_p": 0.95, "seed": 11}

Generate = Callable[..., list[str]]


@pytest.fixture(scope="session")
def generate(quickstart_server: Server) -> Generate:
    """Answers to all prompts, some at once."""

    def answers(*, prompts: list[str] = PROMPTS, **settings: Any) -> list[str]:
        return texts(quickstart_server, prompts, **settings)

    return answers


@pytest.fixture(scope="session")
def target_alone(generate: Generate) -> Callable[[str], list[str]]:
    """The texts without speculation, one request at a time."""
    made: dict[str, list[str]] = {}

    def texts(kind: str) -> list[str]:
        if kind not in made:
            settings = GREEDY if kind == "greedy" else SEEDED
            made[kind] = generate(
                protocol="http", stream=False, at_once=1, num_draft_tokens=0, **settings
            )
        return made[kind]

    return texts


# Each draft length of each kind is asked here or in process, in tests/test_lossless.py.
@pytest.mark.parametrize(
    ("kind", "num_draft_tokens", "protocol", "stream", "at_once"),
    [
        ("greedy", 0, "grpc", True, 8),
        ("seeded", 0, "http", True, 8),
        ("seeded", 1, "http", False, 8),
        ("greedy", 2, "grpc", True, 8),
        ("greedy", 4, "http", True, 1),
        ("seeded", 8, "grpc", False, 8),
    ],
)
def test_the_text_is_the_targets_own(
    generate: Generate,
    target_alone: Callable[[str], list[str]],
    kind: str,
    num_draft_tokens: int,
    protocol: str,
    stream: bool,
    at_once: int,
) -> None:
    found = generate(
        protocol=protocol,
        stream=stream,
        at_once=at_once,
        num_draft_tokens=num_draft_tokens,
        **(GREEDY if kind == "greedy" else SEEDED),
    )
    assert found == target_alone(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_once", [1, 8])
def test_the_text_is_the_targets_own_in_every_way_of_asking(
    generate: Generate,
    target_alone: Callable[[str], list[str]],
    kind: str,
    num_draft_tokens: int,
    protocol: str,
    stream: bool,
    at_once: int,
) -> None:
    test_the_text_is_the_targets_own(
        generate, target_alone, kind, num_draft_tokens, protocol, stream, at_once
    )


def test_the_server_answers_as_the_pair_does_in_process(
    quickstart_repository: Path, generate: Generate
) -> None:
    version = quickstart_repository / "speculative" / "1"
    tokenizer = Tokenizer.load(version / "tokenizer")
    pair_file = PairFile.read(version / "pair.json")
    pair = load_runtime(pair_file.runtime).load_pair(
        version / "draft", version / "target", pair_file.options, tokenizer.detokenizer
    )
    prompts = PROMPTS[:6]
    texts = dict.fromkeys(prompts, "")
    for prompt in prompts:
        pair.submit(
            Request(
                request_id=prompt,
                prompt_token_ids=tuple(tokenizer.encode(prompt)),
                max_tokens=24,
                end_token_ids=tokenizer.end_token_ids,
            )
        )
    while pair.has_work():
        for chunk in pair.step():
            texts[chunk.request_id] += chunk.text
    served = generate(protocol="grpc", stream=True, at_once=6, prompts=prompts, **GREEDY)
    assert served == list(texts.values())


def test_the_draft_is_of_use_and_the_numbers_add_up(quickstart_server: Server) -> None:
    with Client(quickstart_server.grpc_url) as client:
        completion = client.generate("def fibonacci(n):", max_tokens=64, end_id=-1)
    statistics = completion.statistics
    assert statistics is not None
    assert statistics.num_output_tokens == 64
    assert statistics.num_steps < 64
    assert statistics.total_accepted_draft_tokens + statistics.num_steps == 64
    assert statistics.acceptance_rate == pytest.approx(
        statistics.total_accepted_draft_tokens / statistics.total_draft_tokens
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 2000}, "max_tokens is 2000; prompt and output together may have 1024"),
        ({"max_tokens": 4, "num_draft_tokens": 9}, "num_draft_tokens is 9; this pair drafts at"),
        ({"max_tokens": 4, "top_p": 1.5}, "top_p is 1.5; it must be between 0 .exclusive. and 1"),
        ({"max_tokens": 4, "temperature": -1.0}, "temperature is -1.0; it must be 0 .greedy. or"),
    ],
)
def test_a_request_over_a_limit_is_refused_with_the_numbers(
    quickstart_server: Server, settings: dict[str, float], message: str
) -> None:
    for url in (quickstart_server.http_url, quickstart_server.grpc_url):
        with Client(url) as client, pytest.raises(RequestError, match=f"^{message}"):
            client.generate("def f():", **settings)


def test_an_over_long_prompt_is_refused_with_the_numbers(quickstart_server: Server) -> None:
    with (
        Client(quickstart_server.grpc_url) as client,
        pytest.raises(RequestError, match=r"the prompt has \d{4} tokens; prompt and output toget"),
    ):
        client.generate("x = 1\n" * 1000, max_tokens=4)


def test_the_built_repository_has_no_fault_after_its_move(quickstart_repository: Path) -> None:
    assert lint.lint(quickstart_repository) == []


def test_a_closed_loop_of_streams_is_measured_through_the_server(quickstart_server: Server) -> None:
    target = str(ROOT / "models" / "python-code" / "target")
    side = ThroughTriton(
        Process("triton", ["alone", "k2"], target, "", options={"url": quickstart_server.grpc_url})
    )
    tokenizer = Tokenizer.load(Path(target))
    prompts = [tokenizer.encode(prompt)[:24] for prompt in PROMPTS[:3]]
    measurements = Measurements(side)
    load = Load(streams=2, num_requests=8, max_tokens=10)
    alone, drafted = (
        measurements.measure(Point(setting, load, prompts)) for setting in ("alone", "k2")
    )
    assert (alone["num_different"], drafted["num_different"]) == (0, 0)
    assert (alone["acceptance_length"], alone["draft_tokens_a_pass"]) == (1.0, 0.0)
    assert drafted["draft_tokens_a_pass"] > 1.0
    assert alone["num_tokens"] > 10
