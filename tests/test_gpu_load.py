"""benchmarks/gpu_load.py: the closed loop and its figures, what sides are asked, and the report."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu_load import main
from benchmarks.load import ours
from benchmarks.load.closed_loop import Answer, ClosedLoop, Load, percentiles
from benchmarks.load.goals import RATIOS, Place, Rates, goals
from benchmarks.load.prompts import prompt_set
from benchmarks.load.report import main as report_main
from benchmarks.load.report import report
from benchmarks.load.sides import Counts, Emitted, Point, Process, drive, kind_of
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

    def run(self, point: Point, loop: ClosedLoop) -> Counts:
        drive(self, point, loop)
        num_tokens = sum(answer.max_tokens for answer in loop.answers)
        return Counts(num_drafted=num_tokens, num_accepted=num_tokens // 2, num_late=3)

    def submit(self, answer: Answer, prompt: Sequence[int], setting: str) -> None:
        self._left[answer.number] = (answer.max_tokens, prompt)
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


def run(load: Load, size: int = 1) -> tuple[ClosedLoop, Chunky]:
    clock = Now()
    loop, side = ClosedLoop(load, clock=clock), Chunky(clock, size)
    drive(side, Point("alone", load, [[7], [8], [9]]), loop)
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
    with pytest.raises(RuntimeError, match="had nothing more to ask before all streams were busy"):
        loop.figures()
    loop = ClosedLoop(Load(streams=1, num_requests=2, max_tokens=4), clock=Now())
    assert loop.ask() is not None
    loop.take(0, 3)
    with pytest.raises(RuntimeError, match=r"answers \[0\] have not as many tokens"):
        loop.figures()
    assert percentiles([]) is None


@pytest.mark.parametrize(
    ("side", "setting", "kind"),
    [
        ("ours", "alone", ""),
        ("ours", "k2", ""),
        ("ours", "adaptive", ""),
        ("ours", "lookup", "lookup"),
        ("ours", "noise-alone", "noise"),
        ("triton", "lookup", ""),
        ("vllm", "invariant", "invariant"),
        ("vllm", "draft-2", "draft-2"),
        ("vllm", "ngram-8-by-load", "ngram-8-by-load"),
        ("vllm", "k2", None),
        ("vllm", "draft-x", None),
        ("ours", "draft-2", None),
        ("ours", "kx", None),
        ("triton", "noise", None),
    ],
)
def test_settings_of_one_kind_share_a_process(side: str, setting: str, kind: str | None) -> None:
    if kind is None:
        with pytest.raises(ValueError, match=f"{side} has no setting '{setting}'"):
            kind_of(side, setting)
    else:
        assert kind_of(side, setting) == kind


def vllm_process(kind: str, **options: Any) -> Process:
    return Process("vllm", kind, "T", "D", max_streams=8, max_length=100, options=options)


def test_vllm_is_told_how_it_drafts() -> None:
    plain = engine_options(vllm_process("alone"))
    assert "speculative_config" not in plain
    assert (plain["max_model_len"], plain["max_num_seqs"]) == (116, 8)
    assert engine_options(vllm_process("invariant", max_model_len=9)) == {
        **plain,
        "max_model_len": 9,
    }
    draft, ngram = (
        engine_options(vllm_process(kind))["speculative_config"]
        for kind in ("draft-2", "ngram-4-by-load")
    )
    assert draft == {"method": "draft_model", "model": "D", "num_speculative_tokens": 2}
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


def test_answers_that_part_from_the_first_to_their_prompt_are_counted() -> None:
    load = Load(streams=2, num_requests=8, max_tokens=4)
    measurements = Measurements(Chunky(Now(), 2, fault=7))
    found = measurements.measure(Point("alone", load, [[5], [6], [7]]))
    assert (found["num_different"], found["num_late"]) == (1, 3)


def test_a_worker_answers_line_by_line_and_ends_with_a_fault() -> None:
    process = {"side": "ours", "kind": "", "target": "T", "draft": "D"}
    point = Point("alone", Load(1, 3, 2, 9.0), [[4]]).to_json()
    broken = {**point, "load": {**point["load"], "num_requests": 1}}
    told = io.StringIO("".join(f"{json.dumps(line)}\n" for line in (process, point, broken, point)))
    said: list[Any] = []
    serve(told, said.append, lambda process: Chunky(Now(), 1))
    assert [set(line) & {"about", "error", "num_tokens"} for line in said] == [
        {"about"},
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


LINES: list[dict[str, Any]] = [
    {
        "process": "vllm alone",
        "start_seconds": 61.2,
        "about": {"vllm": "0.26.0"},
        "gpu": "H200",
        "torch": "2.11",
    },
    {"process": "vllm draft-2", "error": "the process has ended"},
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
    }
    assert len({goal.what for goal in goals(Rates([]))}) == 2 + sum(len(r.bounds) for r in RATIOS)


def test_the_report_has_a_line_for_each_setting_and_tells_faults() -> None:
    lines = report(LINES).splitlines()
    for expected in (
        "vllm alone (0.26.0): H200, torch 2.11, ready after 61 s",
        "Prompts of 128 tokens, 192 new ones: tokens/s (sets)",
        "| ours adaptive | 3,000 (2,800 3,200)* |",
        "| ours k2 | 2.10 (2.00) |",
        "| vllm alone | 4.25 / 9 |",
        "| vllm invariant |  |",
        "| alone over vLLM batch-invariant | 0.920 (invariant) |",
        "| adaptive over vLLM's best of all at 8 streams | >= 1.7 | 1.714 (ngram-8) | reached |",
        "| compiled or recorded after ready | <= 0 | 2 | missed |",
        "vllm draft-2: the process has ended",
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


def test_our_answers_are_the_same_with_any_drafts_and_beside_any_others(toys: Path) -> None:
    process = Process(
        *("ours", "", str(toys / "target"), str(toys / "draft")),
        max_streams=3,
        max_length=40,
        most_drafted=2,
        dtype="float32",
        device="cpu",
    )
    measurements = Measurements(ours.load(process))
    prompts = [[7, 191, 3], [8] * 9, [9, 60]]
    for streams, setting in ((1, "alone"), (3, "k2"), (3, "adaptive")):
        found = measurements.measure(Point(setting, Load(streams, 4 * streams, 12), prompts))
        assert found["num_different"] == 0
        assert (found["draft_tokens_a_pass"] > 0.0) == (setting == "k2") or setting == "adaptive"
        assert found["num_tokens"] > 0


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
    ]
    assert re.search(r"\| ours alone \| [\d,]+ \|", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "there is nothing to measure"),
        (["--ours", "k"], "ours has no setting 'k'"),
        (["--ours", "alone", "--sets", "poems"], "--sets: unknown poems"),
        (["--vllm", "alone"], "--vllm wants --inflated"),
        (["--triton", "alone"], "--triton wants --url"),
    ],
)
def test_a_run_that_cannot_be_is_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert told in capsys.readouterr().err
