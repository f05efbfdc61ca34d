"""nightly/summary.py: the whole text for recorded runs."""

from __future__ import annotations

from dataclasses import replace

from specpipe.evaluate.nightly.record import Accepted, Run, StageRun
from specpipe.evaluate.nightly.run import Finished
from specpipe.evaluate.nightly.summary import write_summary
from tests.evaluate.nightly.recorded import good_run, next_run, speed_up

BAD = replace(
    next_run(),
    outcome="bad",
    compared_with="2026-11-26T02:23:00+00:00",
    reasons=["acceptance rate 0.020 is 0.037 of the last good run's 0.540"],
    notes=["speed was measured again; measurement 1: 0.71 at concurrency 1"],
    stages=[
        StageRun(stage="check", reasons=(), duration_s=0.0),
        StageRun(stage="draft/convert", reasons=("input a|b changed",), duration_s=1.5),
    ],
    acceptance=Accepted(num_draft_tokens=1000, num_accepted_tokens=20),
    speed_ups=[speed_up(1, 0.95, 0.9, 1.0)],
)
UNFINISHED = Run(
    pair="other",
    config="other.yaml",
    made_at="2026-11-27T02:24:00+00:00",
    reasons=["draft: token 3 is <pad>, target: </s>\nchange draft.checkpoint"],
)


def test_the_whole_text() -> None:
    done = [Finished(BAD, good_run()), Finished(UNFINISHED)]
    assert (
        write_summary(done)
        == """\
## specpipe nightly: 0 of 2 good

| pair | result | rebuilt | verdict | acceptance | speed-up | repository |
| --- | --- | --- | --- | --- | --- | --- |
| code | **bad** | 1 of 2 stages | identical | 0.020 (0.540) | 1: 0.95 (1.50) | 25.0 MB (25.0 MB) |
| other | **unfinished** | - | - | - | - | - |

In brackets: the last good run.

### code: bad

configs/code.yaml · 2026-11-27T02:23:00+00:00 · compared with the run of 2026-11-26T02:23:00+00:00 \
· served by Triton on Xeon (8 cores), 1 x H100

- acceptance rate 0.020 is 0.037 of the last good run's 0.540
- rebuilt draft/convert: input a|b changed
- speed was measured again; measurement 1: 0.71 at concurrency 1
- speed-up at concurrency 1: 0.95, 95 % interval 0.90 to 1.00
- draft: org/draft, commit 0a1b, SHA-256 dddddddddddddddd
- target: ../target, SHA-256 eeeeeeeeeeeeeeee

### other: unfinished

other.yaml · 2026-11-27T02:24:00+00:00

- draft: token 3 is &lt;pad&gt;, target: &lt;/s&gt;
  change draft.checkpoint
"""
    )


def test_a_first_run_has_nothing_in_brackets() -> None:
    text = write_summary([Finished(good_run())])
    assert text.splitlines()[4] == (
        "| code | good | nothing | identical | 0.540 | 1: 1.50<br>8: 1.20 | 25.0 MB |"
    )
    assert "In brackets" not in text
