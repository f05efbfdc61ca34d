"""nightly/summary.py: the whole text for recorded runs."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from specpipe.evaluate.nightly.junit import write_junit
from specpipe.evaluate.nightly.record import Run, StageRun
from specpipe.evaluate.nightly.run import Finished
from specpipe.evaluate.nightly.summary import write_summary
from tests.evaluate.nightly.recorded import accepted, good_run, next_run, speed_up

BAD = replace(
    next_run(),
    outcome="bad",
    compared_with="2026-11-26T02:23:00+00:00",
    compared_version=7,
    changes=["draft: commit 0a1b → 9c8d; other model.safetensors", "torch 2.12 → 2.13"],
    reasons=["acceptance rate fell to 0.037 of version 7's"],
    notes=["speed was measured again; measurement 1: 0.71 at concurrency 1"],
    stages=[
        StageRun(stage="check", reasons=(), duration_s=0.0),
        StageRun(stage="draft/convert", reasons=("input a|b changed",), duration_s=1.5),
    ],
    acceptance=accepted([0.02, 0.03], kinds=("a|b", "<c>")),
    speed_ups=[speed_up(1, 0.95, 0.9, 1.0)],
)
UNFINISHED = Run(
    pair="other",
    config="other.yaml",
    made_at="2026-11-27T02:24:00+00:00",
    reasons=["draft: token 3 is <pad>, target: </s>\nchange draft.checkpoint"],
)


def test_the_whole_text() -> None:
    before = replace(good_run(), acceptance=accepted([0.5, 0.6], kinds=("a|b", "<c>")))
    done = [Finished(BAD, before), Finished(UNFINISHED)]
    assert (
        write_summary(done)
        == """\
## specpipe nightly: 0 of 2 good

| pair | result | rebuilt | verdict | acceptance | speed-up | repository |
| --- | --- | --- | --- | --- | --- | --- |
| code | **bad** | 1 of 2 stages | identical | 0.013 (0.427) | 1: 0.95 (1.50) | 25.0 MB (25.0 MB) |
| other | **unfinished** | - | - | - | - | - |

In brackets: the run that it is compared with.

### code: bad

configs/code.yaml · 2026-11-27T02:23:00+00:00 · compared with version 7, of \
2026-11-26T02:23:00+00:00 · served by Triton on Xeon (8 cores), 1 x H100

- acceptance rate fell to 0.037 of version 7's
- changed since version 7: draft: commit 0a1b → 9c8d; other model.safetensors; torch 2.12 → 2.13
- rebuilt draft/convert: input a|b changed
- speed was measured again; measurement 1: 0.71 at concurrency 1
- version 7 does not say what it was made from
- speed-up at concurrency 1: 0.95, 95 % interval 0.90 to 1.00
- p50 of the first token at concurrency 8: 20.0 ms, 95 % interval 18.0 to 22.0
- p99 of the first token at concurrency 8: 50.0 ms, 95 % interval 40.0 to 60.0
- target in fp8: 1.01 times the perplexity of its plain form, mean KL 0.02 nats, top-1 \
agreement 0.96
- draft: org/draft, commit 0a1b, SHA-256 dddddddddddddddd
- target: ../target, SHA-256 eeeeeeeeeeeeeeee

| acceptance, with 95 % intervals | this run | version 7 | ratio |
| --- | --- | --- | --- |
| all prompts | 0.013 (0.001 to 0.024) | 0.427 (0.379 to 0.476) | 0.029 (0.001 to 0.058) |
| position 1 | 0.025 (0.000 to 0.055) | 0.550 (0.462 to 0.638) | 0.045 (0.000 to 0.102) |
| position 2 | 0.000 (0.000 to 0.391) | 0.555 (0.436 to 0.673) | 0.000 |
| kind a\\|b | 0.010 (0.000 to 0.031) | 0.375 (0.289 to 0.461) | 0.027 (0.000 to 0.087) |
| kind &lt;c&gt; | 0.015 (0.000 to 0.040) | 0.480 (0.392 to 0.568) | 0.031 (0.000 to 0.085) |

### other: unfinished

other.yaml · 2026-11-27T02:24:00+00:00

- draft: token 3 is &lt;pad&gt;, target: &lt;/s&gt;
  change draft.checkpoint
"""
    )


def test_the_same_as_junit() -> None:
    """What XML has no place for is replaced; CI systems read this with parsers of their own."""
    odd = replace(good_run(), pair="co\x07de", notes=["a <note> & more"])
    root = ElementTree.fromstring(write_junit([Finished(BAD), Finished(UNFINISHED), Finished(odd)]))
    (suite,) = root
    assert suite.attrib == {
        "name": "specpipe nightly", "tests": "3", "failures": "1", "errors": "1",
    }  # fmt: skip
    found = [(case.get("name"), case[0].tag, case[0].get("message")) for case in suite]
    assert found == [
        ("code", "failure", "acceptance rate fell to 0.037 of version 7's"),
        ("other", "error", UNFINISHED.reasons[0]),
        ("co\ufffdde", "system-out", None),
    ]
    assert [case[0].text for case in suite][::2] == [
        "acceptance rate fell to 0.037 of version 7's\n"
        "changed since version 7: draft: commit 0a1b → 9c8d; other model.safetensors; torch 2.12 → "
        "2.13\nspeed was measured again; measurement 1: 0.71 at concurrency 1",
        "a <note> & more",
    ]


def test_a_first_run_has_nothing_in_brackets() -> None:
    text = write_summary([Finished(good_run())])
    assert text.splitlines()[4] == (
        "| code | good | nothing | identical | 0.540 | 1: 1.50<br>8: 1.20 | 25.0 MB |"
    )
    assert "In brackets" not in text
