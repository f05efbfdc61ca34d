"""benchmarks/parallel_draft.py: what is measured, and what is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.load.sides import check_setting
from benchmarks.parallel_draft import (
    Measured,
    Results,
    goals,
    main,
    measure,
    parse_arguments,
    process_of,
    report,
    settings_of,
)
from tests.toy import write_toy_checkpoint
from tests.toy_tokenizers import byte_level

FORMATS = ["--formats", "fp8,awq", "--device", "cuda", "--sizes", "7b+0.4b"]


def arguments(*words: str) -> Any:
    return parse_arguments(["--parallel-draft", "P", "--k", "1,2", "--parallel-k", "2,8", *words])


def test_each_setting_is_one_of_ours() -> None:
    settings = settings_of(arguments(*FORMATS))
    for setting in settings:
        check_setting("ours", setting)
    assert len(set(settings)) == len(settings) == 9 + 2 * (1 + 3 * 2)
    assert not any("fp8" in setting for setting in settings_of(arguments()))
    process = process_of(arguments(*FORMATS), settings, 200)
    assert (process.most_drafted, process.sizes) == (8, ("0.4b", "7b"))


def measured(*rates: float, length: float = 2.0) -> Measured:
    return Measured(list(rates), [length] * len(rates))


RESULTS = Results(
    {
        "alone": measured(100.0, 50.0),
        "drafts-k1": measured(110.0, 55.0),
        "drafts-k2": measured(150.0, 75.0),
        "parallel-drafts-k2": measured(140.0, 70.0),
        "parallel-drafts-k8": measured(180.0, 90.0),
        "parallel-drafts-adaptive": measured(200.0, 100.0),
        "parallel-adaptive": measured(220.0, 110.0),
        "fp8-alone": measured(160.0, 80.0),
        "fp8-drafts-k2": measured(192.0, 96.0),
        "fp8-fp8draft-drafts-k1": measured(216.0, 108.0),
        "fp8-parallel-drafts-k8": measured(230.4, 115.2),
        "awq-alone": measured(200.0, 100.0),
        "awq-drafts-k2": measured(240.0, 120.0),
        "awq-awqdraft-drafts-k1": measured(270.0, 135.0),
        "awq-parallel-drafts-k2": measured(288.0, 144.0),
    }
)


def test_what_is_to_be_reached_on_a_cpu() -> None:
    """The machine was half as fast in the second round, in which the ratios are the same."""
    found = goals(RESULTS, is_gpu=False)
    assert [(figure, least) for _, figure, least in found] == [
        (pytest.approx(2.0), 1.25),
        (pytest.approx(2.2), 1.8),
    ]


def test_what_is_to_be_reached_on_a_gpu() -> None:
    """180 / 150; the drafts gain 1.5 and 1.8, FP8 alone 1.6, and both 1.92, 2.16 and 2.304.

    AWQ alone gains 2.0, and both 2.4, 2.7 and 2.88.
    """
    found = goals(RESULTS, is_gpu=True)
    assert [(pytest.approx(figure), least) for _, figure, least in found] == [
        (1.2, 1.1),
        (1.92 / 2.4, 0.82),
        (2.16 / 2.4, 0.9),
        (2.304 / 2.88, 0.9),
        (2.4 / 3.0, 0.82),
        (2.7 / 3.0, 0.9),
        (2.88 / 3.6, 0.9),
    ]


def test_a_target_in_a_format_is_what_its_drafts_are_compared_with() -> None:
    lines = report(RESULTS, dict.fromkeys(RESULTS) | {"parallel-drafts-k8": 1.9})
    by_setting = {line.split()[0]: line for line in lines}
    assert "1.200 (" in by_setting["fp8-drafts-k2"]
    assert "1.350 (" in by_setting["awq-awqdraft-drafts-k1"]
    assert by_setting["parallel-drafts-k8"].split()[-2:] == ["2.00", "1.900"]


@pytest.mark.parametrize(
    ("formats", "fault"),
    [("fp8", "--formats wants --device cuda"), ("fp8,int2", "unknown int2; there are fp8,awq")],
)
def test_formats_that_cannot_be_measured_are_refused(
    formats: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--parallel-draft", "P", "--formats", formats])
    assert fault in capsys.readouterr().err


def test_all_sides_give_the_same_answers(tmp_path: Path) -> None:
    """A toy whose mask was never trained: what it proposes is wrong, and no answer."""
    says: dict[str, Any] = {"target": {}, "draft": {}, "parallel": {"pard_token": 256}}
    for name, said in says.items():
        settings = {"num_hidden_layers": 1, "dtype": "float32", "vocab_size": 264, **said}
        write_toy_checkpoint(tmp_path / name, seed=len(name), **settings)
        byte_level().save(str(tmp_path / name / "tokenizer.json"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f("}\n{"prompt": "import os"}\n')
    folders = [word for name in ("target", "draft") for word in (f"--{name}", f"{tmp_path}/{name}")]
    told = parse_arguments(
        ["--parallel-draft", f"{tmp_path}/parallel", "--k", "2", "--parallel-k", "3", *folders]
        + ["--prompts", str(prompts), "--max-tokens", "12", "--rounds", "2"]
    )
    results, bounds = measure(told, lambda line: None)
    assert [each.num_different for each in results.values()] == [0] * 7
    assert all(len(each.rates) == 2 and each.rate > 0 for each in results.values())
    assert {setting for setting, bound in bounds.items() if bound} == {
        "drafts-k2",
        "parallel-drafts-k3",
    }
