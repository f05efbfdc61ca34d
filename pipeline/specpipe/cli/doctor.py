"""`specpipe doctor`: what this machine has, and what differs in NVIDIA's image."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from specpipe.cli.options import json_option
from specpipe.cli.output import print_result


@click.command()
@click.option(
    "--tensorrt-llm",
    "compares_image",
    is_flag=True,
    help="Inside NVIDIA's image: compare what specpipe knows of TensorRT-LLM with what is there.",
)
@click.option(
    "--app-dir",
    type=click.Path(path_type=Path),
    default=Path("/app"),
    help="Where the image has NVIDIA's templates, scripts and examples.",
)
@json_option
def doctor(compares_image: bool, app_dir: Path, as_json: bool) -> None:
    """Say what this machine has for building and serving."""
    if not compares_image:
        from specpipe.build.doctor import examine
        from specpipe.machine.columns import aligned

        lines = examine()
        print_result(
            {line.subject: line.text for line in lines},
            aligned([(line.subject, line.text) for line in lines], texts=(0, 1)),
            as_json=as_json,
        )
        return
    from specpipe.build.doctor import describe_stub
    from specpipe.build.quickstart import packaged_settings
    from specpipe.errors import ServerError
    from specpipe.runtimes.tensorrt_llm.differences import TableComparison, refused
    from specpipe.runtimes.tensorrt_llm.doctor import compare_image

    version, comparisons = compare_image(app_dir, packaged_settings)
    try:
        stub = TableComparison("Triton's Python models", describe_stub(), ())
    except ServerError as exc:
        stub = TableComparison("Triton's Python models", "tritonserver", (refused(str(exc)),))
    comparisons = (*comparisons, stub)
    lines_of_image = []
    for comparison in comparisons:
        verdict = "differs" if comparison.differences else "as known"
        lines_of_image.append(f"{comparison.subject} ({comparison.examined}): {verdict}")
        lines_of_image += [
            f"  {'refused' if difference.is_refused else 'note'}: {difference.text}"
            for difference in comparison.differences
        ]
    compared = [dataclasses.asdict(comparison) for comparison in comparisons]
    print_result({"release": version, "comparisons": compared}, lines_of_image, as_json=as_json)
    refusing = [comparison.subject for comparison in comparisons if comparison.is_refused]
    if refusing:
        raise click.ClickException(
            f"what specpipe writes for TensorRT-LLM {version} would be refused here: "
            f"{', '.join(refusing)}"
        )
