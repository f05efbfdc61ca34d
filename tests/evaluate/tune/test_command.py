"""What the command prints and writes, with measurements that are made up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from specpipe.build.load import load_config
from specpipe.cli.group import main
from specpipe.cli.tune import tune
from specpipe.evaluate.prompts import PromptSet
from specpipe.evaluate.tune import model, outcome, run, schedule
from specpipe.evaluate.tune.acceptance import AcceptanceEstimate
from specpipe.evaluate.tune.costs import LoadCosts
from specpipe.evaluate.tune.measure import Measurement
from specpipe.evaluate.tune.outcome import Tuned, Tuning
from specpipe.evaluate.tune.summary import summary

COSTS = (
    LoadCosts(1, 0.001, {0: 0.010, 1: 0.011, 2: 0.012}, 0.0, 0.0),
    LoadCosts(4, 0.002, {0: 0.013, 1: 0.017, 2: 0.021}, 0.001, 0.002),
)
ACCEPTANCE = AcceptanceEstimate.of([{(2, 2): 6, (2, 1): 2, (2, 0): 2}] * 2, 2)


def made_up(path: Path, *others: Tuned) -> Tuning:
    """Two loads, of which the second is better off without drafting."""
    best = {1: 2, 4: 0}
    own = Tuned(
        checkpoint="org/draft",
        is_own=True,
        acceptance=ACCEPTANCE,
        kinds={"code": ACCEPTANCE},
        costs=COSTS,
        memory_bound=model.MemoryBound.fit(COSTS),
        predictions=tuple(model.predict(0.7, ACCEPTANCE.rates, COSTS, 2)),
        measurements=(
            Measurement(
                concurrency=1,
                num_draft_tokens=2,
                tokens_per_s=150.0,
                speed_up=1.6,
                lowest=1.5,
                highest=1.7,
            ),
        ),
        best=best,
    )
    drafts = sorted((own, *others), key=lambda draft: draft.score, reverse=True)
    forms = tuple(schedule.server_settings(best, "org/draft"))
    return Tuning(drafts=tuple(drafts), forms=forms, prompts=PromptSet("code", ()), path=path)


def test_summary(tmp_path: Path) -> None:
    assert (
        "\n".join(summary(made_up(tmp_path / "tune.json")))
        == """\
draft org/draft: 2 prompts of code, 20 steps; alpha 0.78
acceptance, all
position                   1          2
accepted / judged      16/20      12/16
rate                    0.80       0.75
95% interval       0.80-0.80  0.75-0.75
tokens a step           1.80       2.40

milliseconds of a draft step, and of the target verifying K draft tokens
concurrency  draft step  K = 0  K = 1  K = 2  rest of a step
1                  1.00  10.00  11.00  12.00    0.00 to 0.00
4                  2.00  13.00  17.00  21.00    1.00 to 2.00
target: 9.00 ms + 1.00 ms a row, at most 0% from what was measured
draft: 0.67 ms + 0.33 ms a row, at most 0% from what was measured

speed over that of the target alone (lowest and highest round)
concurrency  K  tokens a step  published  a + b rows  predicted          measured
1            1           1.80       1.55        1.50       1.50
1            2           2.40       1.82        1.71       1.71  1.60 (1.50-1.70)
4            1           1.80       1.47        1.23       1.23
4            2           2.40       1.67        1.25       1.24

draft tokens that pay, by concurrency: 2 at 1, 0 at 4

for this pair (--write puts it there), below speculation:
schedule:
  - {from_batch_size: 1, num_draft_tokens: 2}
  - {from_batch_size: 2, num_draft_tokens: 0}

TensorRT-LLM 1.2 (from that batch size on):
max_draft_len: 2
draft_len_schedule: {1: 2, 2: 0}

TensorRT-LLM 1.3 (up to that batch size, and nothing above the last):
max_draft_len: 2
draft_len_schedule: {1: 2, 4: 0}

vLLM 0.24.0 (batch sizes from, to; before this release num_speculative_tokens is all there is; \
vLLM documents the table as tested with EAGLE and DFlash drafts only):
{"method": "draft_model", "model": "org/draft", "num_speculative_tokens": 2, \
"num_speculative_tokens_per_batch_size": [[1, 1, 2], [2, 4, 0]]}"""
    )


def test_other_drafts_are_ranked_and_a_better_one_named(tmp_path: Path) -> None:
    own = made_up(tmp_path).own
    better = Tuned(
        checkpoint="org/better",
        is_own=False,
        acceptance=ACCEPTANCE,
        costs=COSTS,
        predictions=tuple(model.predict(1.0, (1.0, 1.0), COSTS, 2)),
    )
    refused = Tuned(checkpoint="org/other", is_own=False, reason="token 5 is another one")
    lines = summary(made_up(tmp_path, refused, better))
    start = lines.index("drafts by predicted speed-up, the mean over all loads")
    # Own: sqrt(1.714 · 1.244); better: 3 tokens in 14 ms instead of 10, and in 27 instead of 14.
    assert own.score == pytest.approx((2.4 / 1.4 * 2.4 * 14 / 27) ** 0.5)
    assert lines[start + 1 : start + 5] == [
        "1. org/better: 1.83",
        "2. org/draft, the pair's own: 1.46",
        "3. org/other: cannot be paired",
        "org/better is better than the pair's own: name it as draft.checkpoint, build and tune "
        "again",
    ]
    assert "draft org/other: cannot be paired: token 5 is another one" in lines


def test_what_is_not_certain_is_not_recommended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = tmp_path / "tune.json"
    result.write_text('{"kind": "tune"}')
    found = made_up(result)
    own = dataclasses.replace(found.own, best=None, doubts=("concurrency 1: chance",))
    uncertain = dataclasses.replace(found, drafts=(own,), forms=())
    assert summary(uncertain)[-2:] == [
        "nothing is recommended: what pays at each load is not certain yet; tune again when this "
        "machine is quiet, or with a longer --time-limit",
        "concurrency 1: chance",
    ]
    monkeypatch.setattr(run, "tune", lambda *_, **__: uncertain)
    path = tmp_path / "x.yaml"
    path.write_text("name: x\ndraft: {checkpoint: d}\ntarget: {checkpoint: t}\n")
    done = CliRunner().invoke(main, ["tune", "--config", str(path), "--write"])
    assert done.exit_code == 1
    assert f"Error: {path} stays as it is: what pays at each load is not certain" in done.stderr
    assert "schedule" not in path.read_text()


def invoke(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str
) -> tuple[outcome.TuneOptions, str]:
    """Runs the command on a config of its own; what it asked for, and stdout."""
    given: list[outcome.TuneOptions] = []
    result = tmp_path / "tune.json"
    result.write_text('{"kind": "tune"}')

    def fake(config: object, options: outcome.TuneOptions, **_: object) -> Tuning:
        given.append(options)
        return made_up(result)

    monkeypatch.setattr(run, "tune", fake)
    path = tmp_path / "x.yaml"
    path.write_text("name: x\ndraft: {checkpoint: d}\ntarget: {checkpoint: t}\n# end\n")
    done = CliRunner().invoke(tune, ["--config", str(path), *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return given[0], done.stdout


def test_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options, _ = invoke(monkeypatch, tmp_path)
    assert options == outcome.TuneOptions()
    options, _ = invoke(
        monkeypatch,
        tmp_path,
        *("--prompts", "chat", "--limit", "5", "--max-tokens", "9", "--temperature", "0.8"),
        "--chat",
        *("--candidate", "a", "--candidate", "b", "--concurrency", "1,4,8"),
        *("--max-draft-len", "6", "--best", "3", "--rounds", "5", "--no-resume"),
    )
    assert options == outcome.TuneOptions(
        prompts="chat",
        limit=5,
        is_chat=True,
        max_tokens=9,
        temperature=0.8,
        concurrencies=(1, 4, 8),
        max_draft_len=6,
        candidates=("a", "b"),
        num_best=3,
        rounds=5,
        resumes=False,
    )


def test_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, stdout = invoke(monkeypatch, tmp_path, "--json")
    assert json.loads(stdout) == {"kind": "tune"}


def test_the_schedule_is_written_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    invoke(monkeypatch, tmp_path)
    path = tmp_path / "x.yaml"
    assert load_config(path).speculation.limits == ()
    invoke(monkeypatch, tmp_path, "--write")
    assert load_config(path).speculation.limits == ((1, 2), (2, 0))
    assert "# end\n" in path.read_text()
