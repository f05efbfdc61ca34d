"""`specpipe check`: whether a pair fits together and on a GPU, before anything is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specpipe.cli.options import json_option, load, pair_options, small_files_option
from specpipe.cli.output import print_result

if TYPE_CHECKING:
    from specpipe.build.planning import Checked


@click.command()
@pair_options
@click.option(
    "--gpu",
    metavar="NAME_OR_GB",
    help="Plan memory for this GPU, as H100 or 24; left out: those of this machine.",
)
@small_files_option
@json_option
def check(
    config_path: Path,
    overrides: Sequence[str],
    gpu: str | None,
    small_files: Path | None,
    as_json: bool,
) -> None:
    """Check that draft and target can be paired, and that they fit on a GPU.

    Reads small files only.
    """
    from specpipe.build import planning
    from specpipe.machine import gpus

    config = load(config_path, overrides)
    found = gpus.gpus_with_memory() if gpu is None else (gpus.find_gpu(gpu),)
    checked = planning.check(config, small_files=small_files, gpus=found)
    plan = checked.plan
    if gpu is not None and plan is None:
        raise click.UsageError("--gpu has no effect: engine.device is cpu.")
    print_result(_checked_json(checked), _lines(checked), as_json=as_json)
    if plan is not None and not plan.fits:
        number = next(on_gpu.number for on_gpu in plan.gpus if not on_gpu.fits)
        to_lower = "engine.max_batch_size or engine.max_seq_len"
        if config.engine.kv_cache_memory is not None:
            to_lower = "engine.kv_cache_memory"
        raise click.ClickException(
            f"the pair does not fit on GPU {number}: lower {to_lower}"
            + (", or choose a format that would fit" if plan.changes else "")
        )


def _checked_json(checked: Checked) -> dict[str, Any]:
    memory = {role: dataclasses.asdict(estimate) for role, estimate in checked.memory.items()}
    plan = None if checked.plan is None else checked.plan.to_json()
    return {**dataclasses.asdict(checked.contract), "memory": memory, "memory_plan": plan}


def _lines(checked: Checked) -> Iterator[str]:
    from specpipe.build import memory_plan

    contract = checked.contract
    yield (
        f"draft and target fit: {contract.num_used_token_ids} token ids in use; embedding rows: "
        f"draft {contract.draft_vocab_size}, target {contract.target_vocab_size}"
    )
    yield f"context: draft {contract.draft_max_seq_len}, target {contract.target_max_seq_len}"
    yield f"end ids: {', '.join(map(str, contract.end_token_ids)) or 'none'}"
    for role, estimate in checked.memory.items():
        yield f"memory of the {role}: {estimate}"
    if checked.plan is not None:
        yield from memory_plan.lines(checked.plan)
    for note in contract.notes:
        yield f"note: {note}"
