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

        lines = examine()
        width = max(len(line.subject) for line in lines) + 2
        print_result(
            {line.subject: line.text for line in lines},
            (f"{line.subject:{width}}{line.text}" for line in lines),
            as_json=as_json,
        )
        return
    from specpipe.runtimes.tensorrt_llm.doctor import compare_image

    release, comparisons = compare_image(app_dir)
    lines_of_image = []
    for comparison in comparisons:
        verdict = "differs" if comparison.differences else "as known"
        lines_of_image.append(f"{comparison.subject} ({comparison.examined}): {verdict}")
        lines_of_image += [f"  {difference}" for difference in comparison.differences]
    compared = [dataclasses.asdict(comparison) for comparison in comparisons]
    data = {"release": release.version, "comparisons": compared}
    print_result(data, lines_of_image, as_json=as_json)
    differing = [comparison.subject for comparison in comparisons if comparison.differences]
    if differing:
        raise click.ClickException(
            f"this is not what specpipe knows of TensorRT-LLM {release.version}: "
            f"{', '.join(differing)}"
        )
