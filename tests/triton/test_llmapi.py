"""Backend pytorch behind the same face: the repository as packaged, on a real Triton, with a
`tensorrt_llm` that stands in for the real one: that of 1.2, with two engines, and of 1.4, with one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from specpipe.build import execution, planning, repositories
from specpipe.build.load import load_config
from specpipe.errors import RequestError
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.torch.pair import load_pair
from specpipe.speculative.request import Request
from specpipe.text.tokenizer import Tokenizer
from specpipe.triton.client import Client, Completion
from specpipe.triton.server import launcher
from specpipe.triton.server.server import Server
from tests.quiet import Quiet
from tests.runtimes.table_engine import run
from tests.runtimes.torch.engines import build_engine
from tests.tensorrt_llm_stand_ins.llm_api import FOLDER
from tests.tensorrt_llm_stand_ins.llm_api_lines import VERSION_VARIABLE, VERSIONS
from tests.triton.asking import metrics

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "models" / "python-code"
PROMPTS = [
    json.loads(line)["prompt"]
    for line in (ROOT / "benchmarks" / "prompts.jsonl").read_text().splitlines()
][::4]
MAX_TOKENS = 24

_PREFIX = """\
import os, sys
sys.path[:0] = [{fake!r}, {root!r}]
os.environ["FAKE_TENSORRT_LLM_ACTIVE"] = {active!r}
os.environ["{variable}"] = "{version}"
"""


@pytest.fixture(scope="module", params=["1.2", "1.4"])
def line(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(line: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llmapi")


@pytest.fixture(scope="module")
def server(line: str, folder: Path) -> Iterator[Server]:
    path = folder / "pair.yaml"
    engine = {
        "runtime": "tensorrt_llm",
        "max_seq_len": 1024,
        "tensorrt_llm": {"backend": "pytorch", "version": VERSIONS[line]},
    }
    sides = {role: {"checkpoint": str(PAIR / role)} for role in ("draft", "target")}
    path.write_text(yaml.safe_dump({"name": "toy", **sides, "engine": engine}))
    config = load_config(path)
    execution.run(planning.plan(config), Quiet())
    repository = repositories.built_repository(config).rename(folder / "moved")
    model = repository / "speculative" / "1" / "model.py"
    prefix = _PREFIX.format(
        fake=str(FOLDER),
        root=str(ROOT),
        active=str(folder / "active"),
        variable=VERSION_VARIABLE,
        version=VERSIONS[line],
    )
    model.write_text(prefix + model.read_text())
    with launcher.running(repository) as running:
        yield running


@pytest.fixture(scope="module")
def target_alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The texts of the target in this process, with no draft token drafted."""
    folder = tmp_path_factory.mktemp("alone")
    tokenizer = Tokenizer.load(PAIR / "target")
    engines = [
        build_engine(PAIR / role, folder / role, max_seq_len=1024) for role in ("draft", "target")
    ]
    options = PairOptions(
        num_draft_tokens=0, adaptive=False, max_batch_size=4, max_seq_len=1024, max_num_tokens=64
    )
    pair = load_pair(*engines, options, tokenizer.detokenizer)
    requests = [
        Request(
            request_id=str(number),
            prompt_token_ids=tuple(tokenizer.encode(prompt)),
            max_tokens=MAX_TOKENS,
            end_token_ids=tokenizer.end_token_ids,
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    chunks = run(pair, requests)
    return ["".join(chunk.text for chunk in chunks[request.request_id]) for request in requests]


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, server: Server) -> str:
    return server.http_url if request.param == "http" else server.grpc_url


def test_greedy_equals_the_target_alone(url: str, target_alone: list[str]) -> None:
    with Client(url) as client:
        texts = [client.generate(prompt, max_tokens=MAX_TOKENS).text for prompt in PROMPTS]
    assert texts == target_alone


def test_streamed_at_once_equals_whole(url: str, target_alone: list[str]) -> None:
    def stream(prompt: str) -> list[Completion]:
        with Client(url) as client:
            return list(client.stream(prompt, max_tokens=MAX_TOKENS))

    with ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(stream, PROMPTS))
    assert ["".join(chunk.text for chunk in chunks) for chunks in streams] == target_alone
    assert max(len(chunks) for chunks in streams) > 3


def test_the_last_response_says_what_the_request_was(url: str, line: str) -> None:
    with Client(url) as client:
        chunks = list(client.stream(PROMPTS[0], max_tokens=16, end_id=-1))
    assert {chunk.statistics is None for chunk in chunks[:-1]} == {True}
    last = chunks[-1]
    assert last.finish_reason == "length"
    assert last.statistics is not None
    counts = last.statistics.to_json()
    tokenizer = Tokenizer.load(PAIR / "target")
    assert counts["num_input_tokens"] == len(tokenizer.encode(PROMPTS[0]))
    assert counts["num_output_tokens"] == 16
    accepted = counts["total_accepted_draft_tokens"]
    if line == "1.2":  # where counts are inferred from the steps
        assert (counts["num_steps"], counts["draft_status"]) == (16 - accepted, "decided_by_engine")
    else:
        assert counts["draft_status"] == "drafted"
    assert counts["is_lossless"] is True
    assert counts["total_draft_tokens"] > 0
    assert counts["acceptance_rate"] == pytest.approx(accepted / counts["total_draft_tokens"])


def test_stop_words_and_log_probs(url: str, line: str) -> None:
    with Client(url) as client:
        text = client.generate(PROMPTS[0], max_tokens=MAX_TOKENS, end_id=-1).text
        stop = text[len(text) // 2 :][:4]
        cut = client.generate(PROMPTS[0], max_tokens=MAX_TOKENS, end_id=-1, stop_words=[stop])
        assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")
        if line == "1.4":
            with pytest.raises(RequestError, match="return_log_probs: .* with a draft"):
                client.generate(PROMPTS[0], max_tokens=5, end_id=-1, return_log_probs=True)
            return
        logged = client.generate(PROMPTS[0], max_tokens=5, end_id=-1, return_log_probs=True)
    assert len(logged.log_probs) == 5
    assert all(log_prob < 0 for log_prob in logged.log_probs)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0: TensorRT-LLM's pytorch backend drafts 4"),
        ({"temperature": 0.8, "seed": 3}, "seed: TensorRT-LLM's pytorch backend draws for all"),
        ({"repetition_penalty": 1.1}, r"repetition_penalty is 1\.1: "),
        ({"max_tokens": 1200}, "max_tokens is 1200; prompt and output together may have 1024"),
    ],
)
def test_refusals_name_the_input(url: str, settings: dict[str, float], expected: str) -> None:
    with Client(url) as client, pytest.raises(RequestError, match=expected):
        client.generate("def f(x):", **{"max_tokens": 8, **settings})


def test_sampling_with_a_draft(url: str, line: str) -> None:
    """One engine accepts by matching, so the distribution is the target's."""
    with Client(url) as client:
        if line == "1.2":
            with pytest.raises(RequestError, match=r"temperature is 0\.8: "):
                client.generate("def f(x):", max_tokens=8, temperature=0.8)
            return
        done = client.generate("def f(x):", max_tokens=8, temperature=0.8, end_id=-1)
    assert done.statistics is not None
    assert (done.statistics.num_output_tokens, done.statistics.is_lossless) == (8, True)


def test_closed_streams_leave_nothing_behind(
    server: Server, folder: Path, wait_until: Callable[..., bool]
) -> None:
    """Neither here nor in TensorRT-LLM; more of them than max_batch_size."""

    def ask(number: int) -> None:
        with Client(server.grpc_url) as client:
            stream = client.stream(PROMPTS[number % len(PROMPTS)], max_tokens=300, end_id=-1)
            for _ in range(1 + number % 3):
                next(stream)
            stream.close()

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(ask, range(12)))

    def in_flight() -> float:
        return metrics(server, "specpipe_")["specpipe_requests_in_flight"]

    assert wait_until(lambda: in_flight() == 0)
    assert wait_until(lambda: (folder / "active").read_text() == "0")
