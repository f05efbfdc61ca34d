"""`specpipe bench`: load on a served pair, with and without speculation, or on two servers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specpipe.cli import bench_servers
from specpipe.cli.bench_servers import server_options
from specpipe.cli.options import (
    NumberRange,
    chat_option,
    cut_options,
    json_option,
    load,
    numbers,
    optional_pair_options,
    prompts_options,
)
from specpipe.cli.output import print_result
from specpipe.cli.progress import log
from specpipe.errors import ServerError

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig
    from specpipe.evaluate.bench.metrics import CountTokens
    from specpipe.evaluate.bench.run import BenchSettings
    from specpipe.text.tokenizer import Tokenizer


@click.command()
@optional_pair_options
@server_options
@prompts_options
@chat_option
@click.option(
    "--input-tokens",
    metavar="N|LOW-HIGH",
    help="Cut or lengthen each prompt to so many tokens, or to a number drawn from a range. Left "
    "out: prompts as they are.",
)
@click.option(
    "--max-tokens",
    metavar="N|LOW-HIGH",
    help="Tokens of an answer at most, or a number drawn from a range. Left out: what the prompt "
    "says, else 128.",
)
@click.option(
    "--ignore-end",
    is_flag=True,
    help="Let no end id end an answer, so that all have --max-tokens tokens.",
)
@click.option(
    "--tokenizer",
    "tokenizer_dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder of a tokenizer, for --input-tokens and for counting what a server does not count. "
    "Left out: that of the pair.",
)
@click.option(
    "--concurrency",
    "concurrencies",
    type=numbers,
    metavar="N,N,...",
    default="1,4,8",
    help="Loads to measure: numbers of streams, each of which asks one question after the other.",
)
@click.option(
    "--num-draft-tokens",
    type=click.IntRange(1),
    help="K on the side with speculation. Left out: as the pair is served.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    help="How often each side answers all prompts at each load, the sides in turns.",
)
@click.option(
    "--warm-up",
    "num_warm_up",
    type=click.IntRange(0),
    default=0,
    help="Answers thrown away before each measurement; at least one for each stream.",
)
@click.option("--temperature", type=NumberRange(0), default=0.0, help="0: greedy.")
@cut_options
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    help="Decides drawn lengths, the order of prompts, and sampled answers.",
)
@click.option(
    "--ttft-limit-ms",
    type=NumberRange(0, min_open=True),
    help="Goodput counts answers whose first output comes within this time.",
)
@click.option(
    "--tpot-limit-ms",
    type=NumberRange(0, min_open=True),
    help="Goodput counts answers that take at most this time for each output token.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the result; aiperf's records go into a folder of its name. Left out: "
    "results/bench.json beside the repository, where there is a --config.",
)
@json_option
def bench(
    config_path: Path | None,
    overrides: Sequence[str],
    concurrencies: tuple[int, ...],
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure speed under load, with and without speculation.

    With --config alone the pair is served for the time of the benchmark. With --url a running
    server is asked; --config then names its pair, whose tokenizer counts and whose folder keeps the
    result. Speculation is compared with the target alone, on the same server and prompts, in turns;
    with --against two servers are compared.

    TTFT is the time to the first output, TPOT that for each output token after it, gap what passes
    between two outputs of a stream. Failed and cut answers are counted, and are in no time and no
    rate.
    """
    from specpipe.evaluate.bench import run, table
    from specpipe.evaluate.bench.compare import require_scipy
    from specpipe.evaluate.bench.workload import Workload
    from specpipe.evaluate.results import header, write_result

    bench_servers.check(config_path, options)
    is_one_server = options["against"] is None
    if options["url"] is None or not is_one_server:
        require_scipy()  # before a server is started for nothing
    settings = _settings(concurrencies, options)
    config = None if config_path is None else load(config_path, overrides)
    tokenizer = _tokenizer(config, options["tokenizer_dir"])
    if options["input_tokens"] is not None and tokenizer is None:
        raise click.UsageError("--input-tokens needs --tokenizer, or --config of a built pair.")
    workload = Workload(
        source=options["prompts"],
        limit=options["limit"],
        input_tokens=options["input_tokens"],
        max_tokens=options["max_tokens"],
        is_chat=options["is_chat"],
    )
    prompts = workload.load(tokenizer, seed=settings.seed)
    count_tokens = _counter(tokenizer)
    with contextlib.ExitStack() as stack:
        sides = bench_servers.open_sides(stack, config, options)
        measurements = run.measure(sides, prompts, settings, report=log)
    result = {
        **header(
            "bench",
            pair=options["url"] if config is None else config.name,
            settings={**settings.to_json(), **workload.to_json()},
            prompts=prompts,
            libraries=("tritonclient", "scipy", "numpy"),
        ),
        **run.result(measurements, settings, count_tokens=count_tokens),
    }
    if output is None and config is not None:
        output = config.artifacts.result("bench")
    if output is not None:
        write_result(output, result)
        run.write_records(output.with_suffix(""), measurements, count_tokens=count_tokens)
    summaries = measurements.summaries(settings.limits, count_tokens)
    lines = table.lines(summaries, result, is_one_server=is_one_server)
    print_result(result, lines, as_json=as_json)
    if output is not None:
        log(f"written: {output}")
    _check_measured(result)


def _check_measured(result: dict[str, Any]) -> None:
    for measured in result["loads"]:
        for name, side in measured["sides"].items():
            if not side["num_complete"]:
                raise ServerError(
                    f"{name}: no answer at concurrency {measured['concurrency']} was complete, so "
                    "that nothing was measured"
                )


def _settings(concurrencies: tuple[int, ...], options: dict[str, Any]) -> BenchSettings:
    from specpipe.evaluate.bench.metrics import LatencyLimits
    from specpipe.evaluate.bench.run import BenchSettings
    from specpipe.speculative.request import Sampling

    restricts = options["top_k"] > 1 or options["top_p"] < 1.0
    if restricts and not options["temperature"]:
        raise click.UsageError(
            "--top-k and --top-p need --temperature: greedy has no use for them."
        )
    return BenchSettings(
        concurrencies=concurrencies,
        rounds=options["rounds"],
        num_warm_up=options["num_warm_up"],
        sampling=Sampling(
            temperature=options["temperature"], top_k=options["top_k"], top_p=options["top_p"]
        ),
        ignores_end=options["ignore_end"],
        seed=options["seed"],
        limits=LatencyLimits(
            first_output_s=_seconds(options["ttft_limit_ms"]),
            output_token_s=_seconds(options["tpot_limit_ms"]),
        ),
    )


def _tokenizer(config: PipelineConfig | None, folder: Path | None) -> Tokenizer | None:
    from specpipe.build.repositories import built_repository
    from specpipe.text.tokenizer import Tokenizer
    from specpipe.triton.repository.contents import load_tokenizer

    if folder is not None:
        return Tokenizer.load(folder)
    return None if config is None else load_tokenizer(built_repository(config))


def _counter(tokenizer: Tokenizer | None) -> CountTokens | None:
    if tokenizer is None:
        return None
    return lambda text: len(tokenizer.encode_fragment(text))


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
