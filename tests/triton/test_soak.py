"""Random requests, good and bad, from 32 clients at once; some go away in the middle."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpipe.config.limits import ServedLimits
from specpipe.errors import RequestError
from specpipe.runtimes.pair_file import PairFile
from specpipe.runtimes.runtime import load_runtime
from specpipe.text.tokenizer import Tokenizer
from specpipe.text.tools.message_format import MessageFormat
from specpipe.triton import serving
from specpipe.triton.client import Client, Completion
from specpipe.triton.server.server import Server
from tests.triton.asking import metrics

NUM_CLIENTS = 32
MAX_GROWTH_BYTES = 24 << 20  # what an allocator may keep; one leaked KV cache a request is far more
PROMPTS = [
    json.loads(line)["prompt"]
    for line in (Path(__file__).parents[2] / "benchmarks" / "prompts.jsonl")
    .read_text()
    .splitlines()
]

# One of the last in priority may wait for two thirds of the run, minutes on a busy machine.
TIMEOUT_S = 600

# What is refused, and with which words.
INVALID: tuple[tuple[dict[str, Any], str], ...] = (
    ({"max_tokens": 0}, "max_tokens is 0; it must be 1 or more"),
    ({"max_tokens": 5000}, "max_tokens is 5000; prompt and output together may have 1024"),
    ({"temperature": -1.0}, "temperature is -1.0; it must be 0"),
    ({"temperature": float("inf")}, "temperature is inf; it must be 0"),
    ({"top_p": 2.0}, "top_p is 2.0; it must be between 0"),
    ({"min_p": -0.5}, "min_p is -0.5; it must be between"),
    ({"top_k": -3}, "top_k is -3; it must be 0"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be a positive number"),
    ({"num_draft_tokens": 9}, "num_draft_tokens is 9; this pair drafts at most 8"),
    ({"num_draft_tokens": -1}, "num_draft_tokens is -1; it must be 0"),
    ({"end_id": -2}, "end_id is -2; it must be a token id, or -1 for none"),
    ({"beam_width": 4}, "beam_width is not supported: send 1 or leave it out"),
    ({"length_penalty": 2.0}, "length_penalty is not supported"),
    ({"embedding_bias_words": ["a"]}, "embedding_bias_words has 1 entries, embedding_bias_weights"),
    ({"logit_bias_ids": [5]}, "logit_bias_ids has 1 entries, logit_bias_values 0: each takes one"),
    ({"stop_token_ids": [-5]}, "stop_token_ids has -5, which is no token of this model"),
    ({"num_top_log_probs": 99}, "num_top_log_probs is 99; it must be between 0 and 20"),
    ({"tools": "[]"}, "tools says how messages are rendered: send it with messages"),
    ({"timeout_s": -1.0}, "timeout_s is -1.0; it must be positive"),
    ({"messages": "[]"}, "text_input, input_ids and messages: exactly one is needed, text_input a"),
)


@dataclass(frozen=True)
class Case:
    """One request, and what is known of its answer beforehand."""

    number: int
    protocol: str
    stream: bool
    prompt: str
    settings: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    num_chunks_until_cancel: int | None = None

    @property
    def is_certain(self) -> bool:
        """True when the text is determined: greedy, or sampled with a seed."""
        return "temperature" not in self.settings or "seed" in self.settings


def random_case(number: int, rng: random.Random) -> Case:
    settings: dict[str, Any] = {"max_tokens": rng.randint(1, 32)}
    if rng.random() < 0.6:
        settings["temperature"] = round(rng.uniform(0.3, 1.5), 2)
        if rng.random() < 0.7:
            settings["seed"] = rng.getrandbits(64)
        for name, value in (("top_k", rng.randint(2, 50)), ("top_p", 0.9), ("min_p", 0.05)):
            if rng.random() < 0.3:
                settings[name] = value
    for name, value in (
        ("num_draft_tokens", rng.randint(0, 8)),
        ("repetition_penalty", 1.2),
        ("presence_penalty", 0.4),
        ("frequency_penalty", -0.2),
        ("min_tokens", rng.randint(0, 40)),
        ("bad_words", ["self", " return"]),
        ("stop_words", ["\n\n", ":"]),
        ("return_log_probs", True),
        ("exclude_input_in_output", False),
        ("end_id", -1),
        ("priority", rng.randint(-2, 2)),
    ):
        if rng.random() < 0.25:
            settings[name] = value
    case = Case(
        number=number,
        protocol=rng.choice(("http", "grpc")),
        stream=rng.random() < 0.6,
        prompt=rng.choice(PROMPTS)[: rng.randint(1, 400)],
        settings=settings,
    )
    kind = rng.random()
    if kind < 0.2:
        wrong, error = rng.choice(INVALID)
        # JSON knows no infinity.
        protocol = "grpc" if "inf" in error else case.protocol
        return replace(case, protocol=protocol, settings={**settings, **wrong}, error=error)
    if kind < 0.4 and case.stream:
        settings |= {"max_tokens": 200, "end_id": -1, "stop_words": []}
        return replace(case, num_chunks_until_cancel=rng.randint(0, 6))
    return case


def target_only(repository: Path, cases: list[Case]) -> dict[int, str]:
    """The text of each case by the target alone, in this process."""
    version = repository / "speculative" / "1"
    tokenizer = Tokenizer.load(version / "tokenizer")
    pair_file = PairFile.read(version / "pair.json")
    options = replace(pair_file.options, max_queue_size=len(cases), adaptive=False)
    pair = load_runtime(pair_file.runtime).load_pair(
        version / "draft", version / "target", options, tokenizer.detokenizer
    )
    limits = ServedLimits.model_validate_json(
        (repository / "preprocessing" / "1" / "limits.json").read_text()
    )
    texts: dict[int, str] = {}
    for case in cases:
        tensors = {"text_input": np.array([[case.prompt.encode()]], object)}
        for name, value in case.settings.items():
            tensor = serving.input_tensor(name)
            values = value if isinstance(value, list) else [value]
            tensors[name] = serving.as_array(tensor, values)
        generation = serving.parse_request(
            tensors, tokenizer, limits=limits, calls=MessageFormat.of(tokenizer)
        )
        request = replace(generation.request, request_id=str(case.number), num_draft_tokens=0)
        pair.submit(request)
        texts[case.number] = ""
    while pair.has_work():
        for chunk in pair.step():
            texts[int(chunk.request_id)] += chunk.text
    return texts


def ask(server: Server, case: Case) -> list[Completion] | str:
    """The responses, those until the cancellation for a case that has one; or the refusal."""
    url = server.http_url if case.protocol == "http" else server.grpc_url
    received = []
    with Client(url, timeout_s=TIMEOUT_S) as client:
        try:
            if not case.stream:
                return [client.generate(case.prompt, **case.settings)]
            chunks = client.stream(case.prompt, **case.settings)
            if case.num_chunks_until_cancel == 0:
                next(chunks)
                chunks.close()  # type: ignore[attr-defined]
                return received
            for chunk in chunks:
                received.append(chunk)
                if len(received) == case.num_chunks_until_cancel:
                    chunks.close()  # type: ignore[attr-defined]
                    break
        except RequestError as exc:
            return str(exc)
    return received


def check(case: Case, answer: list[Completion] | str, expected: str | None) -> None:
    if case.error is not None:
        assert isinstance(answer, str), (case, answer)
        assert answer.startswith(case.error), (case, answer)
        return
    assert not isinstance(answer, str), (case, answer)
    text = "".join(chunk.text for chunk in answer)
    if case.num_chunks_until_cancel is not None:
        assert expected is None or expected.startswith(text), (case, text, expected)
        return
    assert expected is None or text == expected, (case, text, expected)
    *earlier, last = answer
    assert all(chunk.finish_reason is None and chunk.statistics is None for chunk in earlier)
    assert last.finish_reason in ("stop", "length")
    assert last.statistics is not None
    num_tokens = last.statistics.num_output_tokens
    assert num_tokens <= case.settings["max_tokens"]
    log_probs = [value for chunk in answer for value in chunk.log_probs]
    assert len(log_probs) == (num_tokens if case.settings.get("return_log_probs") else 0), case
    if "seed" in case.settings:
        assert last.statistics.seed_used == case.settings["seed"]
    if case.settings.get("num_draft_tokens") == 0:
        assert last.statistics.draft_status == "off_by_request"
        assert (last.statistics.acceptance_rate, last.statistics.total_draft_tokens) == (0.0, 0)


def memory_of_models(server: Server) -> dict[str, int]:
    """Anonymous memory of each model's process."""
    process = server.triton._process
    assert process is not None
    found = {}
    for children in Path(f"/proc/{process.pid}/task").glob("*/children"):
        for child in children.read_text().split():
            model = re.search(r"([a-z]+)/1/model\.py", Path(f"/proc/{child}/cmdline").read_text())
            rss = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{child}/status").read_text())
            if model and rss:
                found[model[1]] = int(rss[1]) * 1024
    return found


Soak = Callable[[int, int], None]


@pytest.fixture
def soak(
    quickstart_server: Server, quickstart_repository: Path, wait_until: Callable[..., bool]
) -> Iterator[Soak]:
    def run(num_requests: int, seed: int) -> None:
        rng = random.Random(seed)
        cases = [random_case(number, rng) for number in range(num_requests)]
        certain = [case for case in cases if case.error is None and case.is_certain]
        assert len(certain) > num_requests / 3
        expected = target_only(quickstart_repository, certain)
        before = metrics(quickstart_server, *COUNTED)
        start = time.monotonic()
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            answers = list(pool.map(lambda case: ask(quickstart_server, case), cases))
        print(f"{num_requests} requests in {time.monotonic() - start:.1f} s")
        for case, answer in zip(cases, answers, strict=True):
            check(case, answer, expected.get(case.number))
        assert wait_until(lambda: metrics(quickstart_server, *COUNTED)[IN_FLIGHT] == 0)
        after = metrics(quickstart_server, *COUNTED)
        assert {n: v for n, v in after.items() if "nv_inference_pending" in n and v} == {}
        ended = {
            reason: after[name] - before[name]
            for reason in ("stop", "length", "cancelled", "error")
            for name in (f'specpipe_requests_total{{finish_reason="{reason}"}}',)
        }
        num_valid = sum(case.error is None for case in cases)
        num_cancelled = sum(case.num_chunks_until_cancel is not None for case in cases)
        assert ended["error"] == 0
        assert sum(ended.values()) == num_valid
        # A request may end before Triton hears of its client's going.
        assert num_cancelled / 2 <= ended["cancelled"] <= num_cancelled

    yield run


IN_FLIGHT = "specpipe_requests_in_flight"
COUNTED = ("specpipe_", "nv_inference_pending")


def test_60_requests(soak: Soak) -> None:
    soak(60, 1)


@pytest.mark.slow
def test_1000_requests_leave_nothing_behind(soak: Soak, quickstart_server: Server) -> None:
    soak(250, 2)
    before = memory_of_models(quickstart_server)
    assert set(before) == {"preprocessing", "speculative", "postprocessing"}
    soak(1000, 3)
    after = memory_of_models(quickstart_server)
    growth = {model: after[model] - before[model] for model in before}
    print("memory growth:", growth)
    assert max(growth.values()) < MAX_GROWTH_BYTES, growth
