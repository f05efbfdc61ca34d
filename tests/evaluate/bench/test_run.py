from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from specpipe import progress
from specpipe.errors import ServerError
from specpipe.evaluate.bench.load import Load
from specpipe.evaluate.bench.metrics import LatencyLimits
from specpipe.evaluate.bench.run import (
    BenchSettings,
    BenchSide,
    Measurements,
    SideLoads,
    measure,
    result,
    write_records,
)
from specpipe.evaluate.endpoints.base import Piece, Question, Usage
from specpipe.evaluate.prompts import Prompt, PromptSet
from specpipe.speculative.request import Sampling
from tests.evaluate.bench.recorded import answer
from tests.evaluate.endpoints.scripted import Scripted
from tests.recorder import Recorded, Recorder

PROMPTS = PromptSet(
    "mine.jsonl",
    (
        Prompt(name="a", kind="k", text="one", max_tokens=5),
        Prompt(name="b", kind="k", messages=({"role": "user", "content": "two"},)),
        Prompt(name="c", kind="k", text="three"),
    ),
)


def answers_everything(question: Question) -> list[tuple[float, Piece]]:
    return [(0.0, Piece(text="x", num_tokens=1, finish_reason="stop"))]


def side(name: str, num_draft_tokens: int | None = None) -> tuple[BenchSide, Scripted]:
    endpoint = Scripted(answers_everything, name=f"endpoint of {name}")
    return BenchSide(name=name, endpoint=endpoint, num_draft_tokens=num_draft_tokens), endpoint


def test_all_sides_are_asked_the_same_questions_in_the_same_order() -> None:
    without, asked_without = side("without", 0)
    drafting, asked_with = side("with", 4)
    settings = BenchSettings(
        concurrencies=(1,),
        rounds=2,
        sampling=Sampling(temperature=0.8, top_p=0.9),
        ignores_end=True,
        seed=40,
    )
    reports: list[str] = []
    recorder = Recorder()
    with progress.shown(recorder):
        measured = measure((without, drafting), PROMPTS, settings, report=reports.append)
    assert recorder.counts == [
        *(Recorded(name, "answers", 3, 3) for name in reports[1:]),
        Recorded("bench", "loads", 4, 4),
    ]
    assert reports == [
        "to measure: 4 loads of 3 answers each, and warm-ups",
        "concurrency 1, round 1: without",
        "concurrency 1, round 1: with",
        "concurrency 1, round 2: with",
        "concurrency 1, round 2: without",
    ]
    asked = [
        [(q.text, q.messages, q.max_tokens, q.sampling, q.ignores_end) for q in endpoint.asked]
        for endpoint in (asked_without, asked_with)
    ]
    assert asked[0] == asked[1]
    # One to see whether it answers; each round a warm-up and the three prompts.
    assert len(asked[0]) == 1 + 2 * 4
    seeds = {q.text or "two": q.sampling.seed for q in asked_with.asked}
    assert seeds == {"one": 40, "two": 41, "three": 42}
    assert all(q.sampling.is_seeded and q.num_draft_tokens == 4 for q in asked_with.asked)
    assert {q.num_draft_tokens for q in asked_without.asked} == {0}
    limits = {(q.text or "two"): q.max_tokens for q in asked_with.asked[1:]}
    assert limits == {"one": 5, "two": 128, "three": 128}
    by_prompt = measured.by_concurrency[1]["with"].answers_by_prompt()
    assert {name: len(answers) for name, answers in by_prompt.items()} == {"a": 2, "b": 2, "c": 2}
    assert [answer.question.text for answer in by_prompt["c"]] == ["three", "three"]


def test_greedy_questions_have_no_seed() -> None:
    only, endpoint = side("only")
    measure([only], PROMPTS, BenchSettings(concurrencies=(2,), rounds=1), report=lambda line: None)
    assert not any(question.sampling.is_seeded for question in endpoint.asked)


def test_a_side_that_does_not_answer_is_told_before_anything_is_measured() -> None:
    def refuses(question: Question) -> list[tuple[float, Piece | Exception]]:
        return [(0.0, ServerError("no such model"))]

    good, asked = side("good")
    bad = BenchSide(name="bad", endpoint=Scripted(refuses))
    with pytest.raises(ServerError, match="^bad: no such model$"):
        measure((good, bad), PROMPTS, BenchSettings(), report=lambda line: None)
    assert len(asked.asked) == 1


def recorded(seconds: float) -> SideLoads:
    """A load whose answers to the prompts a, b and c took so long each, with 10 tokens."""
    usage = Usage(
        num_output_tokens=10, num_steps=4, total_draft_tokens=8, total_accepted_draft_tokens=6
    )
    made = [answer(0.0, [(seconds / 2, 5), (seconds, 5)], seconds, usage=usage) for _ in range(3)]
    return SideLoads([Load(concurrency=4, answers=tuple(made))], [PROMPTS.prompts])


@pytest.fixture
def measurements() -> Iterator[Measurements]:
    without, with_ = (
        BenchSide(name=n, endpoint=Scripted(answers_everything)) for n in ("no", "yes")
    )
    yield Measurements((without, with_), {4: {"no": recorded(2.0), "yes": recorded(1.0)}})


def test_the_result_has_each_side_and_their_comparison(measurements: Measurements) -> None:
    pytest.importorskip("scipy")
    settings = BenchSettings(concurrencies=(4,), limits=LatencyLimits(first_output_s=0.75))
    found = result(measurements, settings, count_tokens=None)
    json.dumps(found, allow_nan=False)
    assert found["sides"] == [
        {"name": "no", "endpoint": "scripted", "num_draft_tokens": None},
        {"name": "yes", "endpoint": "scripted", "num_draft_tokens": None},
    ]
    (load,) = found["loads"]
    assert load["concurrency"] == 4
    no, yes = load["sides"]["no"], load["sides"]["yes"]
    # Four streams; 30 tokens took them 6 s without, 3 s with.
    assert (no["output_tokens_per_s"], yes["output_tokens_per_s"]) == (20.0, 40.0)
    assert (no["good_answers_per_s"], yes["good_answers_per_s"]) == (0.0, 4.0)
    assert yes["output_token_ms"]["mean"] == 100.0
    assert yes["acceptance"]["rate"] == 0.75
    assert yes["acceptance"]["length"] == 2.5
    assert (yes["server_counters"], yes["gpus"]) == (None, [])
    assert load["comparison"]["ratio"] == 2.0
    assert load["comparison"]["outcome"] == "gain"
    assert found["verdict"].startswith("Yes is faster than no at concurrency 4 (2.00 times")


def test_one_side_has_no_comparison(measurements: Measurements) -> None:
    alone = Measurements(measurements.sides[:1], {4: {"no": recorded(2.0)}})
    found = result(alone, BenchSettings(concurrencies=(4,)), count_tokens=None)
    assert (found["verdict"], found["loads"][0]["comparison"]) == (None, None)


def test_records_go_to_a_file_for_each_side_and_concurrency(
    tmp_path: Path, measurements: Measurements
) -> None:
    write_records(tmp_path, measurements, count_tokens=None)
    found: Sequence[Path] = sorted(tmp_path.rglob("*.jsonl"))
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "side0-concurrency4/profile_export.jsonl",
        "side1-concurrency4/profile_export.jsonl",
    ]
    records = [json.loads(line) for line in found[1].read_text().splitlines()]
    assert [r["metrics"]["request_latency"]["value"] for r in records] == [1000.0, 1000.0, 1000.0]
