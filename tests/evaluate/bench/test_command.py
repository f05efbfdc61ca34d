from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specpipe.cli.bench import bench
from specpipe.config.sections import PipelineConfig
from specpipe.errors import ConfigError, RuntimeUnavailable, ServerError
from specpipe.evaluate.results import read_result
from tests.evaluate.bench.conftest import ROOT
from tests.evaluate.endpoints.fake_openai import (
    CUT,
    DONE,
    Refusal,
    completion,
    serving,
    summary,
)

TOKENIZER = str(ROOT / "models" / "python-code" / "target")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench, arguments, catch_exceptions=False)


def answering(pause_s: float) -> Callable[[dict[str, Any]], Sequence[Any]]:
    """Two chunks of two tokens, with a pause before each."""

    def answer(body: dict[str, Any]) -> Sequence[Any]:
        return [pause_s, completion("a b"), pause_s, completion(" c d", finish_reason="length")] + [
            summary(7, 4),
            DONE,
        ]

    return answer


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(f'{{"prompt": "prompt {n}"}}\n' for n in range(5)))
    return str(path)


def test_two_servers_are_compared(tmp_path: Path, prompts: str) -> None:
    pytest.importorskip("scipy")
    output = tmp_path / "bench.json"
    with serving(answering(0.002)) as fast, serving(answering(0.05)) as slow:
        result = run(
            *("--url", fast.url, "--model", "m", "--against", slow.url, "--against-model", "m"),
            *("--prompts", prompts, "--max-tokens", "4", "--rounds", "1", "--concurrency", "1,3"),
            *("--tokenizer", TOKENIZER, "--output", str(output)),
        )
    assert result.exit_code == 0
    found = read_result(output, "bench")
    assert found["prompts"]["count"] == 5
    assert [side["name"] for side in found["sides"]] == [slow.url, fast.url]
    for load in found["loads"]:
        assert load["comparison"]["outcome"] == "gain"
        assert load["sides"][fast.url]["num_complete"] == 5
        assert load["sides"][fast.url]["num_output_tokens"] == 20
        assert load["sides"][fast.url]["mean_input_tokens"] == 7
    assert found["verdict"] in result.stdout
    assert f"{fast.url} is faster than {slow.url} at concurrency 1 (" in result.stdout
    assert len(list(tmp_path.rglob("profile_export.jsonl"))) == 4
    assert {body["max_tokens"] for _, _, body in fast.asked} == {1, 4}


def test_a_server_by_itself_is_measured_and_cut_streams_are_counted(prompts: str) -> None:
    def answer(body: dict[str, Any]) -> Sequence[Any]:
        return [completion("a"), CUT] if body["prompt"] == "prompt 2" else answering(0.0)(body)

    with serving(answer) as server:
        result = run(
            *("--url", server.url, "--model", "m", "--prompts", prompts, "--rounds", "2"),
            *("--concurrency", "2", "--json"),
        )
    assert result.exit_code == 0
    assert "takes no draft length: to compare it with another server, give --against" in (
        result.stderr
    )
    found = json.loads(result.stdout)
    (load,) = found["loads"]
    (side,) = load["sides"].values()
    assert (side["num_answers"], side["num_complete"], side["num_cut"]) == (10, 8, 2)
    assert side["num_output_tokens"] == 32
    assert (load["comparison"], found["verdict"]) == (None, None)


def test_where_no_answer_is_complete_the_reason_is_told_and_the_command_fails(prompts: str) -> None:
    def answer(body: dict[str, Any]) -> Refusal | Sequence[Any]:
        return (
            Refusal(400, '{"error": "too long"}')
            if body["max_tokens"] > 1
            else answering(0.0)(body)
        )

    with serving(answer) as server:
        result = CliRunner().invoke(
            bench,
            ["--url", server.url, "--model", "m", "--prompts", prompts, "--concurrency", "1"],
        )
    assert "1  " + server.url + ": 15 of 15: " in result.stdout and "too long" in result.stdout
    assert str(result.exception) == (
        f"{server.url}: no answer at concurrency 1 was complete, so that nothing was measured"
    )


def test_a_built_pair_is_served_and_compared_with_its_target(quickstart: PipelineConfig) -> None:
    pytest.importorskip("scipy")
    result = run(
        *("--config", str(ROOT / "configs" / "quickstart.yaml")),
        *("--set", f"output_dir={quickstart.artifacts_dir.parent}"),
        *("--limit", "3", "--max-tokens", "12", "--ignore-end", "--input-tokens", "30"),
        *("--concurrency", "1", "--rounds", "1", "--num-draft-tokens", "2"),
    )
    assert result.exit_code == 0
    found = read_result(quickstart.artifacts_dir / "results" / "bench.json", "bench")
    assert (found["pair"], found["prompts"]["source"]) == ("python-code", "code")
    without, drafting = (found["loads"][0]["sides"][side["name"]] for side in found["sides"])
    assert [side["num_draft_tokens"] for side in found["sides"]] == [0, 2]
    for side in (without, drafting):
        assert (side["num_complete"], side["num_output_tokens"]) == (3, 36)
        assert side["tokens_counted_by"] == "server"
        assert abs(side["mean_input_tokens"] - 30) <= 2
    assert without["acceptance"]["rate"] is None
    accepted = drafting["acceptance"]
    # What is not accepted is the target's own token of each step.
    assert accepted["num_accepted_tokens"] + accepted["num_steps"] == 36
    assert 0 < accepted["num_draft_tokens"] <= 2 * accepted["num_steps"]
    counted = drafting["server_counters"]
    assert counted["num_draft_tokens"] >= accepted["num_draft_tokens"]
    assert len(counted["per_position"]) == 2
    assert all(0 <= rate <= 1 for rate in counted["per_position"])
    assert found["loads"][0]["comparison"]["num_differing_prompts"] == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["streams", "1", "1"]
    assert lines[1].endswith("0, 0 of 3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Give --config, --url or both."),
        (("--url", "http://h:1", "--concurrency", "1,x"), "'--concurrency': '1,x': expected num"),
        (("--url", "http://h:1", "--concurrency", "0"), "'--concurrency': '0': expected numbers"),
        (("--url", "http://h:1", "--top-k", "4"), "--top-k and --top-p need --temperature"),
        (("--url", "http://h:1", "--input-tokens", "9"), "--input-tokens needs --tokenizer, or"),
        (("--url", "http://h:1", "--against-model", "m"), "need --against."),
        (
            ("--url", "openai+http://h:1", "--model", "m", "--num-draft-tokens", "2"),
            "openai+http://h:1 takes no draft length: no --num-draft-tokens.",
        ),
        (
            ("--url", "http://h:1", "--against", "http://h:2", "--num-draft-tokens", "2"),
            "--against compares servers as they are: no --num-draft-tokens.",
        ),
        (
            ("--url", "http://h:1", "--api-key-variable", "NO_SUCH_VARIABLE"),
            "--api-key-variable: NO_SUCH_VARIABLE is not set.",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: tuple[str, ...], message: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    "asked", [("--config", "nothing.yaml"), ("--url", "http://h:1", "--against", "http://h:2")]
)
def test_scipy_is_looked_for_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...]
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "scipy" else there(name)
    )
    with pytest.raises(RuntimeUnavailable, match=r"^comparing two sides needs 'scipy': .*evaluate"):
        run(*asked)


def test_what_cannot_be_measured_is_told(prompts: str) -> None:
    with serving(lambda body: [DONE][:0]) as server:
        asked = ("--url", server.url, "--model", "m", "--prompts", prompts)
        with pytest.raises(ServerError, match="broke off: no finish_reason and no .DONE."):
            run(*asked)
    with pytest.raises(ConfigError, match="^'many' is no length: expected tokens as in 128"):
        run("--url", "http://h:1", "--max-tokens", "many")
    with pytest.raises(ServerError, match="needs the name of a model: --model NAME"):
        run("--url", "openai+http://h:1")
