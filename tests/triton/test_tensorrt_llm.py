"""The production repository of TensorRT-LLM's C++ backend in a real Triton, around a stand-in.

`draft` and `target` are as packaged; what Triton loads for `backend: "tensorrtllm"` is
tests/tensorrt_llm_stand_ins/triton_backend, which runs the quickstart pair.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from specpipe.errors import RequestError, ServerError
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.runtime import load_runtime
from specpipe.speculative.request import Request
from specpipe.text.tokenizer import Tokenizer
from specpipe.triton.client import Client
from specpipe.triton.repository import lint
from specpipe.triton.server import launcher
from specpipe.triton.server.installation import TritonBinary
from specpipe.triton.server.served_models import Version
from specpipe.triton.server.server import Server
from specpipe.triton.server.versions import Versions
from tests.tensorrt_llm_stand_ins.triton_backend.engines import (
    triton_with_stand_in,
    write_repository,
)
from tests.triton.asking import metrics, settled_metrics, texts
from tests.waiting import PATIENCE_S

COUNTED = ("specpipe_", "stand_in_")
PROMPTS = [
    json.loads(line)["prompt"]
    for line in (Path(__file__).parents[2] / "benchmarks" / "prompts.jsonl")
    .read_text()
    .splitlines()
][:8]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> TritonBinary:
    found = triton_with_stand_in(tmp_path_factory.mktemp("backends"))
    if found is None:
        pytest.skip("this Triton takes no other backends than its own")
    return found


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("trtllm") / "model_repo")


@pytest.fixture(scope="module")
def server(repository: Path, binary: TritonBinary) -> Iterator[Server]:
    with launcher.running(repository, binary=binary) as running:
        yield running


def ask_all(server: Server, **settings: Any) -> list[str]:
    return texts(server, PROMPTS, at_once=6, **settings)


@pytest.fixture(scope="module")
def target_alone(repository: Path) -> list[str]:
    """The target's own text, by the torch runtime without Triton."""
    engines = {role: repository / role / "1" / "engine" / "torch" for role in ("draft", "target")}
    tokenizer = Tokenizer.load(repository / "speculative" / "1" / "tokenizer")
    pair = load_runtime("torch").load_pair(
        engines["draft"],
        engines["target"],
        PairOptions(num_draft_tokens=0, max_batch_size=1, max_seq_len=512),
        tokenizer.detokenizer,
    )
    found = dict.fromkeys(PROMPTS, "")
    for prompt in PROMPTS:
        pair.submit(
            Request(
                request_id=prompt,
                prompt_token_ids=tuple(tokenizer.encode(prompt)),
                max_tokens=MAX_TOKENS,
                end_token_ids=tokenizer.end_token_ids,
            )
        )
    while pair.has_work():
        for chunk in pair.step():
            found[chunk.request_id] += chunk.text
    return list(found.values())


def test_what_was_packaged_is_without_fault(repository: Path) -> None:
    assert lint.lint(repository) == []


@pytest.mark.parametrize(
    ("num_draft_tokens", "protocol", "stream"),
    [
        (0, "grpc", True),
        (0, "http", False),
        (1, "http", True),
        (2, "grpc", False),
        (4, "http", True),
        (4, "grpc", True),
        (8, "grpc", False),
        (8, "http", True),
    ],
)
def test_greedy_text_is_the_targets_own_streamed_or_whole(
    server: Server, target_alone: list[str], num_draft_tokens: int, protocol: str, stream: bool
) -> None:
    before = metrics(server, *COUNTED)['stand_in_verified_total{model="target"}']
    found = ask_all(
        server,
        protocol=protocol,
        stream=stream,
        max_tokens=MAX_TOKENS,
        num_draft_tokens=num_draft_tokens,
    )
    assert found == target_alone
    num_verified = metrics(server, *COUNTED)['stand_in_verified_total{model="target"}'] - before
    assert (num_verified > len(PROMPTS)) == (num_draft_tokens > 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"min_tokens": 20, "end_id": 3},
        {"stop_words": ["\n\n", ":"]},
        {"bad_words": ["self", " return"], "repetition_penalty": 1.3},
    ],
)
def test_settings_hold_across_rounds(server: Server, settings: dict[str, Any]) -> None:
    plain, drafted = (
        ask_all(server, max_tokens=MAX_TOKENS, num_draft_tokens=k, **settings) for k in (0, 4)
    )
    assert drafted == plain


def test_a_seeded_request_repeats(server: Server) -> None:
    settings = {"max_tokens": MAX_TOKENS, "temperature": 0.8, "top_p": 0.95, "num_draft_tokens": 4}
    first, second, other = (ask_all(server, seed=seed, **settings) for seed in (5, 5, 6))
    assert first == second != other


def test_32_streams_with_random_cancels_leave_nothing_behind(
    server: Server, wait_until: Callable[..., bool]
) -> None:
    rng = random.Random(3)
    plans = [
        (rng.choice(PROMPTS), rng.choice([0, 1, 4, 8]), rng.choice([None, 1, 2, 5]))
        for _ in range(48)
    ]
    settled_metrics(server)
    before = metrics(server, *COUNTED)

    def ask(plan: tuple[str, int, int | None]) -> int:
        prompt, num_draft_tokens, num_chunks = plan
        count = 0
        with Client(server.grpc_url, timeout_s=PATIENCE_S) as client:
            # One that is left does not end by itself before that is noticed.
            max_tokens = 80 if num_chunks is None else 400
            settings = {
                "max_tokens": max_tokens,
                "end_id": -1,
                "num_draft_tokens": num_draft_tokens,
            }
            chunks = client.stream(prompt, **settings)
            for _ in chunks:
                count += 1
                if count == num_chunks:
                    chunks.close()  # type: ignore[attr-defined]
                    break
        return count

    with ThreadPoolExecutor(32) as pool:
        counts = list(pool.map(ask, plans))
    assert all(count for count in counts)

    def is_quiet() -> bool:
        now = metrics(server, *COUNTED)
        running = [value for name, value in now.items() if name.startswith("stand_in_running")]
        return now["specpipe_requests_in_flight"] == 0 and not any(running)

    assert wait_until(is_quiet)
    after = metrics(server, *COUNTED)
    cancelled = 'specpipe_requests_total{finish_reason="cancelled"}'
    num_cancelled = sum(num_chunks is not None for *_, num_chunks in plans)
    assert num_cancelled / 2 <= after[cancelled] - before[cancelled] <= num_cancelled
    stopped = 'stand_in_stopped_total{model="target"}'
    assert after[stopped] > before[stopped]
    failed = 'specpipe_requests_total{finish_reason="error"}'
    assert after[failed] == before[failed]
    assert len(ask_all(server, max_tokens=2)) == len(PROMPTS)


def test_what_the_engines_cannot_honour_is_refused_by_name(server: Server) -> None:
    with (
        Client(server.grpc_url) as client,
        pytest.raises(RequestError, match="^presence_penalty is not supported by runtime"),
    ):
        client.generate("def f():", max_tokens=4, presence_penalty=0.5)


def test_a_promoted_version_calls_engines_of_its_own(
    server: Server, repository: Path, target_alone: list[str]
) -> None:
    """The rollback leads back to the first ones."""
    versions = Versions(server, lambda folder: server.launch, report=print)
    versions.watch()
    choices: dict[str, Any] = {"replace": False, "report": print}
    versions.promote(Version(repository, 7), keep_previous=True, **choices)
    before = metrics(server, "stand_in_verified_total")
    assert ask_all(server, max_tokens=MAX_TOKENS, num_draft_tokens=4) == target_alone
    after = metrics(server, "stand_in_verified_total")
    grew = {name for name, value in after.items() if value > before[name]}
    assert grew == {'stand_in_verified_total{model="target_7"}'}
    versions.rollback(**choices)
    assert ask_all(server, max_tokens=MAX_TOKENS, num_draft_tokens=4) == target_alone


def change_target(repository: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes what the target's engine says of itself, behind the back of `speculative`."""
    engine = repository / "target" / "1" / "engine" / "config.json"
    config = json.loads(engine.read_bytes())
    change(config)
    engine.unlink()
    engine.write_text(json.dumps(config))


def test_a_target_that_drops_draft_tokens_under_load_answers_as_it_does_alone(
    tmp_path: Path, binary: TritonBinary, target_alone: list[str]
) -> None:
    folder = write_repository(tmp_path / "model_repo")
    change_target(folder, lambda config: config.update(stand_in={"drops": "random"}))
    with launcher.running(folder, binary=binary) as server:
        for num_draft_tokens in (1, 3, 8):
            found = texts(
                server,
                PROMPTS,
                at_once=8,
                stream=True,
                max_tokens=MAX_TOKENS,
                num_draft_tokens=num_draft_tokens,
            )
            assert found == target_alone
        counted = settled_metrics(server)
    drafted, unverified, accepted = (
        counted[f"specpipe_{kind}_draft_tokens_total".replace("__", "_")]
        for kind in ("", "unverified", "accepted")
    )
    assert 0 < accepted <= drafted
    assert unverified > 0


def test_an_engines_error_reaches_the_client_once(tmp_path: Path, binary: TritonBinary) -> None:
    """The target verifies fewer draft tokens than its description in `speculative` says."""
    folder = write_repository(tmp_path / "model_repo")
    change_target(folder, lambda config: config["build_config"].update(max_draft_len=2))
    with launcher.running(folder, binary=binary) as server, Client(server.grpc_url) as client:
        message = "^the target model failed: .*Draft tokens length .8. exceeds maximum draft tokens"
        with pytest.raises((RequestError, ServerError), match=message):
            client.generate(PROMPTS[0], max_tokens=MAX_TOKENS)
        answer = client.generate(PROMPTS[0], max_tokens=4, num_draft_tokens=2)
        assert answer.statistics is not None and answer.statistics.num_output_tokens == 4


def test_acceptance_by_logits_and_adaptive_draft_lengths(
    tmp_path: Path, binary: TritonBinary, target_alone: list[str]
) -> None:
    folder = write_repository(tmp_path / "model_repo", acceptance="logits", adaptive=True)
    with launcher.running(folder, binary=binary) as server:
        assert ask_all(server, max_tokens=MAX_TOKENS) == target_alone
        with Client(server.grpc_url) as client:
            answers = [
                client.generate(p, max_tokens=MAX_TOKENS, temperature=0.7, top_k=20, seed=1)
                for p in PROMPTS[:4]
            ]
        counted = [a.statistics for a in answers if a.statistics is not None]
        assert len(counted) == 4
        assert sum(s.total_accepted_draft_tokens for s in counted) > 0
