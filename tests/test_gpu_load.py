"""benchmarks/gpu_load.py: the closed loop and its figures, what sides are asked, and the report."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.gpu_load import main, parse_arguments, processes
from benchmarks.load import ours
from benchmarks.load.arrivals import Arrivals
from benchmarks.load.chats import Chats
from benchmarks.load.closed_loop import Load
from benchmarks.load.goals import RATIOS, Place, Rates, goals
from benchmarks.load.loop import Answer, AnyLoad, Loop, NoFigures, percentiles
from benchmarks.load.prompts import prompt_set
from benchmarks.load.reading import Readings
from benchmarks.load.report import main as report_main
from benchmarks.load.report import report
from benchmarks.load.sides import Counts, Emitted, Point, Process, check_setting, drive
from benchmarks.load.turns import Run, Settings, Turns
from benchmarks.load.vllm_side import VLLM, engine_options
from benchmarks.load.worker import Measurements, serve
from specpipe.text.tokenizer import Tokenizer
from tests.toy import write_toy_checkpoint
from tests.toy_tokenizers import byte_level


class Now:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Chunky:
    """Gives each of its answers some tokens a step, which takes a second."""

    def __init__(self, clock: Now, size: int, *, fault: int | None = None) -> None:
        self.about: dict[str, Any] = {"size": size}
        self._clock, self._size, self._fault = clock, size, fault
        self._left: dict[int, tuple[int, Sequence[int]]] = {}
        self.most_at_once = 0

    def run(self, setting: str, loop: Loop) -> Counts:
        drive(self, loop)
        num_tokens = sum(answer.max_tokens for answer in loop.answers)
        return Counts(num_drafted=num_tokens, num_accepted=num_tokens // 2, num_late=3)

    def submit(self, answer: Answer) -> None:
        self._left[answer.number] = (answer.max_tokens, answer.prompt)
        self.most_at_once = max(self.most_at_once, len(self._left))

    def step(self) -> Iterator[Emitted]:
        self._clock.now += 1
        for number, (left, prompt) in list(self._left.items()):
            size = min(self._size, left)
            self._left[number] = (left - size, prompt)
            if left == size:
                del self._left[number]
            token = prompt[0] if number != self._fault else 99
            yield Emitted(number, [token] * size, is_last=left == size)


def run(
    load: AnyLoad,
    size: int = 1,
    prompts: Sequence[Sequence[int]] = ((7,), (8,), (9,)),
    clock: Now | None = None,
) -> tuple[Any, Chunky]:
    clock = clock or Now()
    loop, side = load.loop(prompts, clock=clock), Chunky(clock, size)
    drive(side, loop)
    return loop, side


def test_only_the_steady_part_of_a_closed_loop_counts() -> None:
    loop, side = run(Load(streams=2, num_requests=6, max_tokens=4))
    # Streams begin with 2 and 4 tokens. All of these have come at 4; at 10 there is no seventh.
    asked = [(a.number, a.max_tokens, a.asked_at, a.times[-1]) for a in loop.answers]
    assert asked == [
        *((0, 2, 0.0, 2.0), (1, 4, 0.0, 4.0), (2, 4, 2.0, 6.0)),
        *((3, 4, 4.0, 8.0), (4, 4, 6.0, 10.0), (5, 4, 8.0, 12.0)),
    ]
    assert side.most_at_once == 2
    second = {"p50_ms": 1000.0, "p99_ms": 1000.0}
    assert loop.figures() == {
        "seconds": 6.0,
        "num_tokens": 12,
        "num_answers": 2,
        "tokens_per_second": 2.0,
        "first_token": second,
        "answer": {"p50_ms": 4000.0, "p99_ms": 4000.0},
        "chunk_gap": second,
        "token_gap": second,
        "is_cut": False,
    }


def test_a_gap_is_shared_by_the_tokens_behind_it() -> None:
    loop, _ = run(Load(streams=1, num_requests=3, max_tokens=5), size=4)
    figures = loop.figures()  # chunks of 4 and 1, a second each
    assert figures["tokens_per_second"] == 2.5
    assert figures["chunk_gap"] == {"p50_ms": 1000.0, "p99_ms": 1000.0}
    assert figures["token_gap"] == {"p50_ms": 1000.0, "p99_ms": 1000.0}
    loop, _ = run(Load(streams=1, num_requests=3, max_tokens=8), size=4)
    assert loop.figures()["token_gap"] == {"p50_ms": 250.0, "p99_ms": 250.0}


def test_a_steady_part_ends_with_its_time() -> None:
    loop, _ = run(Load(streams=2, num_requests=100, max_tokens=4, seconds=5))
    figures = loop.figures()
    assert (figures["seconds"], figures["is_cut"]) == (6.0, True)  # at 9 all streams were busy
    assert all(answer.is_whole for answer in loop.answers)


def test_what_is_no_closed_loop_has_no_figures() -> None:
    loop, _ = run(Load(streams=2, num_requests=2, max_tokens=4))
    with pytest.raises(NoFigures, match="had nothing more to ask before all streams were busy"):
        loop.figures()
    loop = Load(streams=1, num_requests=2, max_tokens=4).loop([[7]], clock=Now())
    assert loop.ask() is not None
    loop.take(0, 3)
    with pytest.raises(RuntimeError, match=r"answers \[0\] have not as many tokens"):
        loop.figures()
    assert percentiles([]) is None


def test_requests_come_when_they_are_due_whatever_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Now()
    monkeypatch.setattr("time.sleep", lambda seconds: setattr(clock, "now", clock.now + seconds))
    loop, side = run(Arrivals(0.5, seconds=40.0, max_tokens=3, seed=5), clock=clock)
    due = [answer.asked_at for answer in loop.answers]
    begun = clock.now
    twice, _ = run(Arrivals(1.0, seconds=20.0, max_tokens=3, seed=5), clock=clock)
    assert len(due) > 10
    assert [a.asked_at - begun for a in twice.answers] == pytest.approx([at / 2 for at in due])
    # A step takes a second: what is due meanwhile begins with the next one.
    waited = [answer.times[0] - answer.asked_at for answer in loop.answers]
    assert all(1.0 - 1e-9 <= seconds <= 2.0 + 1e-9 for seconds in waited)
    assert side.most_at_once > 1
    figures = loop.figures()
    assert figures["num_answers"] == sum(at >= 10.0 for at in due)
    assert figures["chunk_gap"] == {"p50_ms": 1000.0, "p99_ms": 1000.0}


def test_a_chats_next_prompt_is_all_that_was_said() -> None:
    load = Chats(streams=2, turns=3, max_tokens=2)
    loop, side = run(load, 2, [[7, 7, 7], [1], [2], [3]])
    assert [answer.prompt for answer in loop.answers] == [
        *([7, 7, 7, 1], [7, 7, 7, 2]),
        *([7, 7, 7, 1, 7, 7, 3], [7, 7, 7, 2, 7, 7, 1]),
        *([7, 7, 7, 1, 7, 7, 3, 7, 7, 2], [7, 7, 7, 2, 7, 7, 1, 7, 7, 3]),
    ]
    assert side.most_at_once == 2
    second = {"p50_ms": 1000.0, "p99_ms": 1000.0}
    assert loop.figures() == {
        "num_answers": 6,
        "longest_prompt": 10,
        "mean_first_token_ms": 1000.0,
        "first_turn": second,
        "later_turns": second,
        "chunk_gap": None,
        "token_gap": None,
    }


class Slow(Chunky):
    """Takes ten seconds for a step in which a prompt of five tokens is read."""

    def submit(self, answer: Answer) -> None:
        super().submit(answer)
        if len(answer.prompt) == 5:
            self._clock.now += 9


def test_gaps_are_told_apart_by_whether_a_long_prompt_is_read() -> None:
    clock = Now()
    load = Readings(streams=2, max_tokens=20, num_long=3, pause=4.0)
    prompts = [[1] * 5, [2] * 5, [3] * 5, [7], [8]]
    loop = load.loop(prompts, clock=clock)
    drive(Slow(clock, 1), loop)
    figures = loop.figures()
    assert figures["num_read"] == 3
    assert figures["first_token"] == {"p50_ms": 10_000.0, "p99_ms": 10_000.0}
    assert figures["gap_meanwhile"] == {"p50_ms": 10_000.0, "p99_ms": 10_000.0}
    assert figures["gap_otherwise"] == {"p50_ms": 1000.0, "p99_ms": 1000.0}
    loop, _ = run(Readings(streams=2, max_tokens=3, num_long=3, pause=4.0), 1, prompts)
    with pytest.raises(NoFigures, match="ended before a long prompt had been read"):
        loop.figures()


@pytest.mark.parametrize(
    ("side", "setting", "is_known"),
    [
        ("ours", "alone", True),
        ("ours", "drafts-k2", True),
        ("ours", "half-adaptive", True),
        ("vllm", "reuse", True),
        ("triton", "k2", True),
        ("vllm", "invariant", True),
        ("vllm", "draft-2", True),
        ("vllm", "draft-parallel-8", True),
        ("vllm", "ngram-parallel-8", False),
        ("ours", "parallel-drafts-k8", True),
        ("ours", "fp8-parallel-adaptive", True),
        ("ours", "awq-awqdraft-drafts-k2", True),
        ("triton", "parallel-k2", False),
        ("vllm", "ngram-8-by-load", True),
        ("vllm", "k2", False),
        ("vllm", "draft-x", False),
        ("ours", "draft-2", False),
        ("ours", "kx", False),
        ("triton", "reuse-alone", False),
    ],
)
def test_sides_have_settings(side: str, setting: str, is_known: bool) -> None:
    if is_known:
        check_setting(side, setting)
        return
    with pytest.raises(ValueError, match=f"{side} has no setting '{setting}'"):
        check_setting(side, setting)


def vllm_process(setting: str, **options: Any) -> Process:
    return Process("vllm", [setting], "T", "D", "P", loads=[(8, 100), (3, 60)], options=options)


def test_vllm_is_told_how_it_drafts() -> None:
    plain = engine_options(vllm_process("alone"))
    assert "speculative_config" not in plain
    assert (plain["max_model_len"], plain["max_num_seqs"]) == (116, 8)
    assert engine_options(vllm_process("invariant", max_model_len=9)) == {
        **plain,
        "max_model_len": 9,
    }
    assert engine_options(vllm_process("reuse")) == {**plain, "enable_prefix_caching": True}
    draft, ngram = (
        engine_options(vllm_process(setting))["speculative_config"]
        for setting in ("draft-2", "ngram-4-by-load")
    )
    assert draft == {"method": "draft_model", "model": "D", "num_speculative_tokens": 2}
    # The fields that vLLM's documentation has for PARD.
    assert engine_options(vllm_process("draft-parallel-8"))["speculative_config"] == {
        "method": "draft_model",
        "model": "P",
        "parallel_drafting": True,
        "num_speculative_tokens": 8,
    }
    assert ngram == {
        "method": "ngram",
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [
            [1, 8, 4],
            [9, 16, 4],
            [17, 32, 2],
            [33, 4096, 0],
        ],
    }


class FakeEngine:
    """The part of vLLM's engine that is used: two tokens a step, one of them drafted."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._left: dict[str, int] = {}

    def add_request(self, number: str, prompt: dict[str, Any], sampling: dict[str, Any]) -> None:
        self.asked.append((number, prompt, sampling))
        self._left[number] = sampling["max_tokens"]

    def step(self) -> list[SimpleNamespace]:
        outputs = []
        for number, left in list(self._left.items()):
            size = min(2, left)
            self._left[number] -= size
            if not self._left[number]:
                del self._left[number]
            answer = SimpleNamespace(token_ids=[5] * size)
            outputs.append(
                SimpleNamespace(request_id=number, outputs=[answer], finished=left == size)
            )
        return outputs


def test_vllm_is_driven_by_its_engines_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, started = FakeEngine(), []

    def start(target: str, **options: Any) -> SimpleNamespace:
        started.append((target, options))
        return SimpleNamespace(llm_engine=engine)

    fake = SimpleNamespace(
        __version__="0.26.0",
        LLM=start,
        SamplingParams=dict,
        sampling_params=SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta")),
    )
    monkeypatch.setitem(sys.modules, "vllm", fake)
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_CACHE_ROOT"):
        monkeypatch.setenv(name, "")
    process = vllm_process("draft-1")
    side = VLLM(process)
    assert started == [("T", engine_options(process))]
    load = Load(streams=1, num_requests=3, max_tokens=4)
    found = Measurements(side).measure(Point("draft-1", load, [[7, 8]]))
    assert (found["acceptance_length"], found["draft_tokens_a_pass"]) == (2.0, 0.0)
    assert (found["num_different"], found["num_late"]) == (0, None)
    number, prompt, sampling = engine.asked[0]
    assert (number, prompt) == ("0", {"prompt_token_ids": [7, 8]})
    assert sampling == {
        "temperature": 0.0,
        "max_tokens": 4,
        "ignore_eos": True,
        "detokenize": False,
        "output_kind": "delta",
    }
    engine.asked.clear()
    Measurements(VLLM(vllm_process("reuse"))).measure(Point("reuse", load, [[7, 8]]))
    assert [prompt["cache_salt"] for _, prompt, _ in engine.asked] == ["1", "1", "2", "2", "2"]


def test_answers_that_part_from_the_first_to_their_prompt_are_counted() -> None:
    load = Load(streams=2, num_requests=8, max_tokens=4)
    measurements = Measurements(Chunky(Now(), 2, fault=7))
    found = measurements.measure(Point("alone", load, [[5], [6], [7]]))
    assert (found["num_different"], found["num_late"]) == (1, 3)


def test_a_worker_answers_line_by_line_and_ends_with_a_fault() -> None:
    process = {"side": "ours", "settings": ["alone"], "target": "T", "draft": "D"}
    point = Point("alone", Load(1, 3, 2, 9.0), [[4]]).to_json()
    short = {**point, "load": {**point["load"], "num_requests": 1}}
    broken = {**point, "prompts": []}
    told = io.StringIO(
        "".join(f"{json.dumps(x)}\n" for x in (process, short, point, broken, point))
    )
    said: list[Any] = []
    serve(told, said.append, lambda process: Chunky(Now(), 1))
    assert [set(line) & {"about", "error", "failed", "num_tokens"} for line in said] == [
        {"about"},
        {"failed"},
        {"num_tokens"},
        {"error"},
    ]


def line(side: str, setting: str, rate: float, streams: int = 8, **others: Any) -> dict[str, Any]:
    return {
        "side": side,
        "setting": setting,
        "streams": streams,
        "set": "files",
        "round": 0,
        "prompt_tokens": 128,
        "max_tokens": 192,
        "tokens_per_second": rate,
        "is_cut": False,
        "acceptance_length": 1.0,
        "draft_tokens_a_pass": 0.0,
        "num_different": 0,
        "num_late": 0 if side == "ours" else None,
        "first_token": {"p50_ms": 20.0, "p99_ms": 31.0},
        "chunk_gap": {"p50_ms": 4.25, "p99_ms": 9.0},
        "token_gap": {"p50_ms": 2.125, "p99_ms": 4.5},
        **others,
    }


TIMES = {"p50_ms": 4.0, "p99_ms": 7.0}


def other(load: str, **figures: Any) -> dict[str, Any]:
    """A line of a load that has no rate."""
    return {
        "side": "ours",
        "setting": "adaptive",
        "load": load,
        "streams": 8,
        "num_cached": 7,
        **dict.fromkeys(("first_token", "chunk_gap", "token_gap", "gap_otherwise"), TIMES),
        **figures,
    }


PLACE = ("side", "setting", "streams")
LINES: list[dict[str, Any]] = [
    {
        "process": "vllm alone",
        "start_seconds": 61.2,
        "about": {"vllm": "0.26.0"},
        "gpu": "H200",
        "torch": "2.11",
    },
    {"process": "vllm draft-2", "error": "the process has ended"},
    {**dict(zip(PLACE, ("ours", "alone", 4), strict=True)), "failed": "a stream ended"},
    line("ours", "alone", 1840.0),
    line("ours", "k2", 2900.0, acceptance_length=2.1, draft_tokens_a_pass=2.0),
    line("ours", "adaptive", 2700.0, num_late=2),
    line("ours", "adaptive", 3000.0, round=1),
    line("ours", "adaptive", 2800.0, round=2, num_different=4),
    line("ours", "adaptive", 3200.0, set="text", is_cut=True),
    line("vllm", "alone", 1600.0),
    line("vllm", "ngram-4", 1400.0),
    line("vllm", "ngram-8", 1750.0),
    line("vllm", "invariant", 2000.0, token_gap=None),
    line("ours", "alone", 90.0, 1, prompt_tokens=8000),
    line(
        "vllm", "alone", 80.0, 1, prompt_tokens=8000, first_token={"p50_ms": 10.0, "p99_ms": 11.0}
    ),
]
LINES += [
    line("ours", "alone", 5000.0, 32),
    line("triton", "alone", 4750.0, 32),
    other("Arrivals", share=0.8, requests_per_second=24.5),
    other("Arrivals", share=0.8, requests_per_second=25.5),
    other("Chats", mean_first_token_ms=14.26, first_turn=TIMES, later_turns=None, longest_prompt=9),
    other(
        "Chats",
        setting="reuse-adaptive",
        mean_first_token_ms=3.1,
        first_turn=TIMES,
        later_turns=TIMES,
        longest_prompt=9,
    ),
    other("Readings", gap_meanwhile={"p50_ms": 5.0, "p99_ms": 12.0}, long_tokens=8000),
]


def test_rates_are_means_over_sets_of_medians_over_rounds() -> None:
    rates = Rates(LINES)
    assert rates.of_sets(Place(128, "ours", "adaptive", 8)) == [2800.0, 3200.0]
    assert rates.at(Place(128, "ours", "adaptive", 8)) == 3000.0
    assert rates.at(Place(128, "ours", "adaptive", 1)) is None
    assert rates.best(128, "vllm", ("alone", "ngram"), 8) == ("ngram-8", 1750.0)
    assert rates.best(128, "vllm", ("draft",), 8) is None


def test_goals_are_judged_by_what_was_measured() -> None:
    found = {
        goal.what: (round(goal.figure, 4), goal.note, goal.is_reached)
        for goal in goals(Rates(LINES))
        if goal.figure is not None
    }
    assert found == {
        "alone over vLLM alone at 8 streams": (1.15, "alone", True),
        "adaptive over vLLM's best of all at 8 streams": (1.7143, "ngram-8", True),
        "adaptive over the best fixed K at 8 streams": (1.0345, "k2", True),
        "compiled or recorded after ready": (2, "", False),
        "first token of a long prompt over vLLM's": (2.0, "8,000 tokens, 20 ms, 10 ms", False),
        "alone through Triton over in process at 32 streams": (0.95, "alone", True),
        "gap of chunks through Triton (99th percentile, ms) at 32 streams": (9.0, "", True),
        "first token with reuse of prompts over without at 8 chats": (
            *(0.2174, "3.1 ms, 14.3 ms", True),
        ),
        "adaptive: gaps while a long prompt is read, 99th percentile over usual ones": (
            *(3.0, "12.0 ms, 4.0 ms", False),
        ),
    }
    assert len({goal.what for goal in goals(Rates([]))}) == 6 + sum(len(r.bounds) for r in RATIOS)


def test_the_report_has_a_line_for_each_setting_and_tells_faults() -> None:
    lines = report(LINES).splitlines()
    for expected in (
        "vllm alone (0.26.0): H200, torch 2.11, ready after 61 s",
        "Prompts of 128 tokens, 192 new ones: tokens/s (sets)",
        "| ours adaptive | 3,000 (2,800 3,200)* |  |",
        "| ours k2 | 2.10 (2.00) |  |",
        "| vllm alone | 4.25 / 9 |  |",
        "| vllm invariant |  |  |",
        "| alone over vLLM batch-invariant | 0.920 (invariant) |  |",
        "| alone through Triton over in process |  | 0.950 (alone) |",
        "| adaptive over vLLM's best of all at 8 streams | >= 1.7 | 1.714 (ngram-8) | reached |",
        "| compiled or recorded after ready | <= 0 | 2 | missed |",
        "| ours adaptive | 0.8 | 25 | 4 / 7 | 4 / 7 | 4 / 7 |",
        "| ours adaptive | 8 | 14.26 | 4 / 7 |  | 9 | 7 |",
        "| ours adaptive | 8 | 8000 | 4 / 7 | 5 / 12 | 4 / 7 |",
        "vllm draft-2: the process has ended",
        "ours alone, 4 streams: a stream ended",
        "ours adaptive: answers that part from the first one of a prompt: 4",
        "*: cut by the time that a point may take",
    ):
        assert expected in lines
    unknown = next(line for line in lines if line.startswith("not measured: "))
    assert "alone over vLLM alone (1 32 128);" in unknown


def test_runs_are_joined_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "other.jsonl"]
    for file, part in zip(
        files, (LINES[:5], LINES[5:], [{**LINES[0], "gpu": "H100"}]), strict=True
    ):
        file.write_text("".join(f"{json.dumps(one)}\n" for one in part))
    plot = tmp_path / "load.png"
    report_main([*map(str, files[:2]), "--plot", str(plot)])
    assert capsys.readouterr().out == f"{report(LINES)}\n"
    assert plot.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        report_main([*map(str, files)])
    assert "runs of H100 and of H200 are several tables" in capsys.readouterr().err


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toys")
    for role in ("draft", "target"):
        seed = len(role)
        write_toy_checkpoint(folder / role, num_hidden_layers=1, dtype="float32", seed=seed)
        byte_level().save(str(folder / role / "tokenizer.json"))
    return folder


def test_prompts_of_a_set_are_pieces_from_all_over_it(toys: Path) -> None:
    tokenizer = Tokenizer.load(toys / "target")
    prompts = prompt_set(tokenizer, "text", number=5, length=700)
    assert [len(prompt) for prompt in prompts] == [700] * 5
    assert len({tuple(prompt) for prompt in prompts}) == 5
    with pytest.raises(ValueError, match="too few for pieces of 9000000"):
        prompt_set(tokenizer, "text", number=5, length=9_000_000)


def test_our_answers_are_the_same_with_any_drafts_and_beside_any_others(
    toys: Path, tmp_path: Path
) -> None:
    write_toy_checkpoint(tmp_path, num_hidden_layers=1, dtype="float32", seed=5, pard_token=250)
    settings = ["alone", "drafts-k2", "parallel-k2"]
    process = Process(
        *("ours", settings, str(toys / "target"), str(toys / "draft")),
        parallel=str(tmp_path),
        loads=[(3, 40)],
        most_drafted=2,
        dtype="float32",
        device="cpu",
    )
    side = ours.load(process)
    options = side.about["options"]
    assert (options["drafts"]["parallel"], options["parallel"]["parallel"]["mask_token_id"]) == (
        None,
        250,
    )
    measurements = Measurements(side)
    prompts = [[7, 191, 3], [8] * 9, [9, 60]]
    for streams, setting in ((1, "alone"), (3, "drafts-k2"), (3, "parallel-k2"), (3, "adaptive")):
        found = measurements.measure(Point(setting, Load(streams, 4 * streams, 12), prompts))
        assert found["num_different"] == 0
        is_drafted = found["draft_tokens_a_pass"] > 0.0
        assert is_drafted == setting.endswith("-k2") or setting == "adaptive"
        assert found["num_tokens"] > 0


class FakeChild:
    """Answers each point with a rate, and keeps what it was asked."""

    is_alive = True

    def __init__(self) -> None:
        self.points: list[Point] = []

    def measure(self, point: Point, timeout_s: float) -> dict[str, Any]:
        self.points.append(point)
        return {"tokens_per_second": 96.0 * point.load.streams} if point.load.streams < 8 else {}


def test_each_load_is_put_on_the_settings_that_it_tells_something_of(toys: Path) -> None:
    settings = ["alone", "adaptive", "k2", "drafts-adaptive", "half-adaptive", "reuse-adaptive"]
    told = f"--ours {','.join(settings)} --vllm alone,reuse --inflated x --target {toys}/target "
    told += "--streams 1,4 --also 12@2 --sets files,text --poisson 0.5 --chats 8 --beside 9 "
    told += "--prompt-tokens 9 --system-tokens 20 --message-tokens 3 --long-tokens 30"
    arguments = parse_arguments(told.split())
    assert [process.loads for process in processes(arguments)] == 3 * [
        [(4, 217), (2, 220), (8, 572), (10, 1525)]
    ]
    child, run = FakeChild(), Run(None)
    sides = {("ours", setting): child for setting in settings}
    sides |= {("vllm", setting): child for setting in ("alone", "reuse")}
    Turns(arguments, run, cast("Settings", sides), 0).measure()
    asked: dict[str, list[str]] = {}
    for line in run.lines:
        what = f"{line['load']} {line['set']} {line['prompt_tokens']} {line['streams']}"
        asked.setdefault(what, []).append(f"{line['side']} {line['setting']}")
    usual = ["ours alone", "ours adaptive", "vllm alone"]
    drafted = ["ours adaptive", "ours k2", "ours drafts-adaptive"]
    first = ["ours alone", *drafted]
    half = ["ours half-adaptive"]
    assert asked == {
        "Load files 9 1": [*first, "vllm alone"],
        "Load files 9 4": [*first, *half, "vllm alone"],
        "Load text 9 1": drafted,
        "Load text 9 4": [*drafted, *half],
        "Load files 12 2": usual,
        "Load text 12 2": ["ours adaptive"],
        "Arrivals files 9 8": usual,
        "Chats files 20 8": [*usual[:2], "ours reuse-adaptive", "vllm alone", "vllm reuse"],
        "Readings files 30 9": usual,
    }
    rates = {p.load.per_second for p in child.points if isinstance(p.load, Arrivals)}
    assert rates == {0.5 * 4 * 96.0 / 192}
    chats, readings = (p for p in child.points[-4::3])
    assert [len(prompt) for prompt in chats.prompts[:2]] == [20, 3]
    assert [len(prompt) for prompt in readings.prompts[5:7]] == [30, 9]


@pytest.mark.parametrize("num_rows", [256, 264])
def test_vllm_takes_drafts_of_as_many_rows_only(
    toys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_rows: int
) -> None:
    parallel = write_toy_checkpoint(tmp_path / "parallel", vocab_size=num_rows, pard_token=255)
    told = f"--vllm draft-parallel-8 --inflated {tmp_path} --target {toys}/target"
    words = [*told.split(), "--parallel-draft", str(parallel)]
    if num_rows == 256:
        (process,) = processes(parse_arguments(words))
        assert process.parallel == str(tmp_path / "parallel")
        return
    with pytest.raises(SystemExit):
        parse_arguments(words)
    assert "the draft has 264 rows of the vocabulary, the target 256" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_measures_each_side_in_a_process_of_its_own(
    toys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    options = {
        "--ours": "alone,adaptive",
        "--sets": "files,text",
        "--streams": "2",
        "--out": out,
        "--target": toys / "target",
        "--draft": toys / "draft",
        "--sizes": "",
        "--device": "cpu",
        "--dtype": "float32",
        "--num-prompts": "2",
        "--prompt-tokens": "9",
        "--max-tokens": "4",
        "--poisson": "0.1",
        "--arrival-seconds": "3",
        "--chats": "2",
        "--turns": "2",
        "--system-tokens": "12",
        "--message-tokens": "4",
        "--chat-tokens": "3",
        "--beside": "1",
        "--beside-tokens": "70",
        "--pause": "0.01",
        "--long-tokens": "40",
    }
    broken = ["--triton", "alone", "--url", "grpc://127.0.0.1:9"]
    words = [str(word) for option in options.items() for word in option]
    assert main([*words, *broken, "--least", "5"]) == 1
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["process"] for one in lines if "process" in one] == [
        "ours",
        "triton",
    ]
    points = [(p["side"], p["setting"], p["set"], "error" in p) for p in lines if "side" in p]
    assert points == [
        ("ours", "alone", "files", False),
        ("ours", "adaptive", "files", False),
        ("triton", "alone", "files", True),
        ("ours", "adaptive", "text", False),  # alone is as fast there
        *(
            (*("ours", setting, "files"), False)
            for _ in range(3)
            for setting in ("alone", "adaptive")
        ),
    ]
    loads = [line["load"] for line in lines if "side" in line]
    assert loads[4::2] == ["Arrivals", "Chats", "Readings"]
    assert re.search(r"\| ours alone \| [\d,]+ \|", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "there is nothing to measure"),
        (["--ours", "k"], "ours has no setting 'k'"),
        (["--ours", "alone", "--sets", "poems"], "--sets: unknown poems"),
        (["--vllm", "alone"], "--vllm wants --inflated"),
        (["--triton", "alone"], "--triton wants --url"),
        (["--ours", "parallel-k2"], "ours parallel-k2 wants --parallel-draft"),
    ],
)
def test_a_run_that_cannot_be_is_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert told in capsys.readouterr().err
