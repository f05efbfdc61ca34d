"""benchmarks/peers.py: what it asks of other software, and what it makes of the answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from benchmarks.peers import ENGINES, Job, jobs_of, main, measure, parse_arguments
from tests.toy import toy_config, write_toy_checkpoint

PROMPTS = [[7, 191, 3, 88], [245, 19, 60, 154, 31, 9]]
NUM_TOKENS = 12


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A target that would soon end its answers, with a draft that is the target."""
    folder = write_toy_checkpoint(tmp_path / "toy", dtype="float32")
    job = Job(
        engine="transformers",
        target=str(folder),
        draft=str(folder),
        num_draft_tokens=0,
        prompts=PROMPTS,
        max_tokens=NUM_TOKENS,
        runs=2,
        dtype="float32",
        device="cpu",
    )
    third = ENGINES["transformers"](job).generate(PROMPTS[0])[2]
    (folder / "config.json").write_text(json.dumps(toy_config(dtype="float32", eos_token_id=third)))
    return job


def test_every_way_of_transformers_gives_the_same_whole_answers(job: Job) -> None:
    ways = [
        job,
        replace(job, num_draft_tokens=2),
        replace(job, engine="transformers-compiled"),
    ]
    engines = [ENGINES[way.engine](way) for way in ways]
    expected, *others = ([engine.generate(prompt) for prompt in PROMPTS] for engine in engines)
    assert [len(answer) for answer in expected] == [NUM_TOKENS] * 2
    assert others == [expected] * 2


def test_a_draft_that_is_the_target_is_accepted_whole(job: Job) -> None:
    line = measure(replace(job, num_draft_tokens=2))
    assert line.pop("ms_per_token") == pytest.approx(1000 / line["tokens_per_second"], rel=1e-2)
    assert min(line["runs"]) <= line.pop("tokens_per_second") <= max(line.pop("runs"))
    assert line == {
        "engine": "transformers",
        "version": transformers.__version__,
        "num_draft_tokens": 2,
        "acceptance_length": 3.0,
        "num_prompts": 2,
        "max_tokens": 12,
        "dtype": "float32",
        "device": "cpu",
        "torch": torch.__version__,
    }


class FakeLLM:
    """Answers like vLLM 0.23, two tokens for a draft token of three that is accepted."""

    made: list[FakeLLM] = []

    def __init__(self, model: str, **options: Any) -> None:
        self.options = {"model": model, **options}
        self.sampling: Any = None
        self._num_drafts = 0
        FakeLLM.made.append(self)

    def generate(self, prompts: Sequence[Any], sampling: Any, *, use_tqdm: bool) -> list[Any]:
        assert [list(prompt) for prompt in prompts] == [["prompt_token_ids"]]
        assert not use_tqdm
        self.sampling = sampling
        self._num_drafts += sampling.max_tokens
        answer = SimpleNamespace(token_ids=[5] * sampling.max_tokens)
        return [SimpleNamespace(outputs=[answer])]

    def get_metrics(self) -> list[Any]:
        return [
            SimpleNamespace(name="vllm:spec_decode_num_drafts", value=self._num_drafts),
            SimpleNamespace(
                name="vllm:spec_decode_num_accepted_tokens", value=self._num_drafts // 2
            ),
            SimpleNamespace(name="vllm:e2e_request_latency_seconds", buckets={}),
        ]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that seems to be installed."""
    vllm = ModuleType("vllm")
    vllm.__spec__ = ModuleSpec("vllm", None)
    vllm.__version__ = "0.23.0"  # type: ignore[attr-defined]
    vllm.LLM, vllm.SamplingParams = FakeLLM, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(FakeLLM, "made", [])


@pytest.mark.usefixtures("vllm")
def test_vllm_is_asked_for_its_draft_model(job: Job) -> None:
    line = measure(
        replace(job, engine="vllm", num_draft_tokens=2, vllm_options={"max_num_seqs": 1})
    )
    assert (line["engine"], line["version"]) == ("vllm", "0.23.0")
    assert line["acceptance_length"] == 1.5
    (llm,) = FakeLLM.made
    assert llm.options == {
        "model": job.target,
        "dtype": "float32",
        "max_model_len": 6 + 12 + 4 + 16,
        "max_num_seqs": 1,
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "speculative_config": {
            "method": "draft_model",
            "model": job.draft,
            "num_speculative_tokens": 2,
        },
    }
    assert vars(llm.sampling) == {
        "temperature": 0.0,
        "max_tokens": 12,
        "ignore_eos": True,
        "detokenize": False,
    }


@pytest.mark.usefixtures("vllm")
def test_vllm_is_asked_for_ngram_drafts_without_a_draft_model(job: Job) -> None:
    line = measure(replace(job, engine="vllm-ngram", draft=None, num_draft_tokens=4))
    assert (line["engine"], line["version"]) == ("vllm-ngram", "0.23.0")
    assert (line["num_draft_tokens"], line["acceptance_length"]) == (4, 1.5)
    (llm,) = FakeLLM.made
    assert llm.options["speculative_config"] == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    return ["--target", "/target", "--prompts", str(prompts), "--num-draft-tokens", "0,2,4"]


def engines_and_lengths(command: list[str]) -> list[tuple[str, int]]:
    return [(job.engine, job.num_draft_tokens) for job in jobs_of(parse_arguments(command))]


@pytest.mark.usefixtures("vllm")
def test_ngram_drafts_need_draft_tokens_and_others_a_draft_for_them(command: list[str]) -> None:
    ngram = [("vllm-ngram", 2), ("vllm-ngram", 4)]
    alone = [("transformers", 0), ("transformers-compiled", 0), ("vllm", 0)]
    assert engines_and_lengths(command) == alone + ngram
    assert engines_and_lengths([*command, "--draft", "/draft"]) == [
        *(("transformers", k) for k in (0, 2, 4)),
        ("transformers-compiled", 0),
        *(("vllm", k) for k in (0, 2, 4)),
        *ngram,
    ]


def test_without_vllm_both_of_its_engines_are_left_out(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert engines_and_lengths(command) == [("transformers", 0), ("transformers-compiled", 0)]
    assert capsys.readouterr().err == (
        "vllm is not installed: vllm is left out\nvllm is not installed: vllm-ngram is left out\n"
    )


def test_a_short_answer_is_an_error(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimpleNamespace(num_warm_ups=1, generate=lambda prompt: [1, 2, 3])
    monkeypatch.setitem(ENGINES, "transformers", lambda job: engine)
    with pytest.raises(RuntimeError) as caught:
        measure(job)
    assert str(caught.value) == "an answer has 3 tokens, 12 were asked for"


@pytest.mark.slow
def test_the_command_gives_a_line_for_each_measurement(
    job: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    command = ["--prompts", str(prompts), "--max-tokens", "8", "--runs", "1"]
    command += ["--dtype", "float32", "--device", "cpu", "--num-draft-tokens", "0,2"]
    main([*command, "--target", job.target, "--draft", str(tmp_path / "missing")])
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [(line["engine"], line["num_draft_tokens"], line.get("error")) for line in lines] == [
        ("transformers", 0, None),
        ("transformers", 2, "exit status 1"),
        ("transformers-compiled", 0, None),
    ]
