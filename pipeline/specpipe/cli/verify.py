"""`specpipe verify`: proof that speculation changes the time and not the output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from specpipe.cli.options import (
    NumberRange,
    built_pair_options,
    chat_option,
    json_option,
    load,
    max_tokens_option,
    numbers,
    prompts_options,
)
from specpipe.cli.output import print_result
from specpipe.cli.progress import log


@click.command()
@built_pair_options
@prompts_options
@max_tokens_option
@chat_option
@click.option(
    "--num-draft-tokens",
    "num_draft_tokens",
    type=numbers,
    metavar="K,K,...",
    help="Draft tokens per step to try; left out: 1, half of the pair's, all of them.",
)
@click.option("--strict", "is_strict", is_flag=True, help="Fail on numerical ties too.")
@click.option(
    "--float32",
    "is_float32",
    is_flag=True,
    help="Run both checkpoints with runtime torch in float32: a margin above 1e-4 is a fault.",
)
@click.option(
    "--in-process", "is_in_process", is_flag=True, help="Run the pair here instead of in Triton."
)
@click.option(
    "--distance",
    type=NumberRange(0, 1, min_open=True, max_open=True),
    show_default="0.1",
    help="Total-variation distance that unseeded sampling is tested for; half of it takes four "
    "times as many answers.",
)
@click.option("--no-sampling", is_flag=True, help="Leave out the tests of unseeded sampling.")
@click.option(
    "--gate",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A .jsonl of prompts with expected answers: exact, regex or command.",
)
@click.option(
    "--gate-pass-rate",
    type=NumberRange(0, 1),
    help="Share of the gate's answers that must be right.",
)
@json_option
def verify(
    config_path: Path,
    overrides: Sequence[str],
    num_draft_tokens: tuple[int, ...] | None,
    distance: float | None,
    no_sampling: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Prove that a built pair answers as its target alone does.

    Greedy and seeded answers are compared token by token, for several K, with those of the target
    alone under the same server; unseeded ones by their distribution. The verdict is identical, tie
    (a numerical one, with its margin) or fault, and is written to verification.json beside the
    repository. Exit code 1 on a fault.
    """
    from specpipe.evaluate.verification.outcome import VerifyOptions
    from specpipe.evaluate.verification.run import verify as run
    from specpipe.evaluate.verification.summary import summary

    if options["gate_pass_rate"] is not None and options["gate"] is None:
        raise click.UsageError("--gate-pass-rate has no effect without --gate.")
    if distance is not None and no_sampling:
        raise click.UsageError("--distance has no effect with --no-sampling.")
    verification = run(
        load(config_path, overrides),
        VerifyOptions(
            num_draft_tokens=num_draft_tokens or (),
            distance=None if no_sampling else distance or VerifyOptions.distance,
            **options,
        ),
        report=log,
    )
    data = json.loads(verification.path.read_text(encoding="utf-8")) if as_json else {}
    data.get("repository", {}).pop("files", None)
    print_result(data, summary(verification), as_json=as_json)
    if verification.findings.reason is not None:
        raise click.ClickException(f"verification failed: {verification.findings.reason}")
