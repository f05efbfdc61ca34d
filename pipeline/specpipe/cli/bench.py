"""`specpipe bench`: load on a served pair, with and without speculation, or on two servers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from specpipe.cli.options import NumberRange, Numbers, chat_option, json_option, load
from specpipe.cli.output import print_json
from specpipe.cli.progress import log

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig
    from specpipe.evaluate.bench.metrics import CountTokens
    from specpipe.evaluate.bench.run import Settings, Side
    from specpipe.text.tokenizer import Tokenizer

Protocol = Literal["grpc", "http"]


@click.command()
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="The YAML of the pair, which has been built.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a setting, as for the build; may be given several times.",
)
@click.option(
    "--url",
    metavar="URL",
    help="A running server: http://HOST:PORT or grpc://HOST:PORT for Triton (our ensemble or "
    "NVIDIA's), openai+http://HOST:PORT for vLLM, SGLang, trtllm-serve and the like.",
)
@click.option(
    "--model",
    metavar="NAME",
    help="The server's model; an OpenAI-compatible server needs it. Left out: ensemble.",
)
@click.option(
    "--metrics-url",
    metavar="URL",
    help="The server's metrics endpoint, for acceptance by position. Left out: of a server that "
    "this command starts it is known, of others nothing is read.",
)
@click.option(
    "--against",
    metavar="URL",
    help="A second server, the baseline: both are compared as they are.",
)
@click.option("--against-model", metavar="NAME", help="As --model, for --against.")
@click.option("--against-metrics-url", metavar="URL", help="As --metrics-url, for --against.")
@click.option(
    "--protocol",
    type=click.Choice(["grpc", "http"]),
    default="grpc",
    show_default=True,
    help="How to ask a server that this command starts.",
)
@click.option(
    "--prompts",
    "prompts_source",
    default="code",
    show_default=True,
    help="A set by its name (chat, code, summarization), or a .jsonl or .txt file.",
)
@click.option("--limit", type=click.IntRange(1), help="Take the first prompts only.")
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
    type=Numbers(),
    default="1,4,8",
    show_default=True,
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
    show_default=True,
    help="How often each side answers all prompts at each load, the sides in turns.",
)
@click.option(
    "--warm-up",
    "num_warm_up",
    type=click.IntRange(0),
    default=0,
    help="Answers thrown away before each measurement; at least one for each stream.",
)
@click.option(
    "--temperature", type=NumberRange(0), default=0.0, show_default=True, help="0: greedy."
)
@click.option(
    "--top-k",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="0: all tokens. Needs --temperature.",
)
@click.option(
    "--top-p",
    type=NumberRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="1: all tokens. Needs --temperature.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=0,
    show_default=True,
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
    "--api-key-variable",
    metavar="NAME",
    help="Environment variable that holds the key for OpenAI-compatible servers.",
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
    url: str | None,
    against: str | None,
    protocol: Protocol,
    concurrencies: tuple[int, ...],
    num_draft_tokens: int | None,
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

    if config_path is None and url is None:
        raise click.UsageError("Give --config, --url or both.")
    if against is None and (options["against_model"] or options["against_metrics_url"]):
        raise click.UsageError("--against-model and --against-metrics-url need --against.")
    if against is not None and num_draft_tokens is not None:
        raise click.UsageError("--against compares servers as they are: no --num-draft-tokens.")
    if url is None or against is not None:
        require_scipy()  # before a server is started for nothing
    settings = _settings(concurrencies, options)
    config = None if config_path is None else load(config_path, overrides)
    tokenizer = _tokenizer(config, options["tokenizer_dir"])
    if options["input_tokens"] is not None and tokenizer is None:
        raise click.UsageError("--input-tokens needs --tokenizer, or --config of a built pair.")
    workload = Workload(
        source=options["prompts_source"],
        limit=options["limit"],
        input_tokens=options["input_tokens"],
        max_tokens=options["max_tokens"],
        is_chat=options["is_chat"],
    )
    prompts = workload.load(tokenizer, seed=settings.seed)
    count_tokens = _counter(tokenizer)
    with contextlib.ExitStack() as stack:
        if url is None:
            assert config is not None
            url, options["metrics_url"] = stack.enter_context(_served(config, protocol))
        sides = _sides(stack, url, against, num_draft_tokens, options)
        measurements = run.measure(sides, prompts, settings, report=log)
    pair = url if config is None else config.name
    found = {
        **header(
            "bench",
            pair=pair,
            settings={**settings.to_json(), **workload.to_json()},
            prompts=prompts,
            libraries=("tritonclient", "scipy", "numpy"),
        ),
        **run.result(measurements, settings, count_tokens=count_tokens),
    }
    if output is None and config is not None:
        output = config.artifacts_dir / "results" / "bench.json"
    if output is not None:
        write_result(output, found)
        run.write_records(output.with_suffix(""), measurements, count_tokens=count_tokens)
    if as_json:
        print_json(found)
    else:
        for line in table.lines(measurements.summaries(settings.limits, count_tokens)):
            click.echo(line)
        for paragraph in table.conclusions(found, is_one_server=against is None):
            click.echo(f"\n{paragraph}")
    if output is not None:
        log(f"written: {output}")


def _settings(concurrencies: tuple[int, ...], options: dict[str, Any]) -> Settings:
    from specpipe.evaluate.bench.metrics import Limits
    from specpipe.evaluate.bench.run import Settings
    from specpipe.speculative.request import Sampling

    restricts = options["top_k"] > 1 or options["top_p"] < 1.0
    if restricts and not options["temperature"]:
        raise click.UsageError(
            "--top-k and --top-p need --temperature: greedy has no use for them."
        )
    return Settings(
        concurrencies=concurrencies,
        rounds=options["rounds"],
        num_warm_up=options["num_warm_up"],
        sampling=Sampling(
            temperature=options["temperature"], top_k=options["top_k"], top_p=options["top_p"]
        ),
        ignores_end=options["ignore_end"],
        seed=options["seed"],
        limits=Limits(
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


@contextlib.contextmanager
def _served(config: PipelineConfig, protocol: Protocol) -> Iterator[tuple[str, str]]:
    """Serves a built pair; its URL and that of its metrics."""
    from specpipe.build.repositories import built_repository
    from specpipe.evaluate.serving import served
    from specpipe.triton.repository import lint

    repository = built_repository(config)
    lint.check(repository)
    log("starting a server")
    with served(repository) as server:
        yield server.grpc_url if protocol == "grpc" else server.http_url, server.metrics_url


def _sides(
    stack: contextlib.ExitStack,
    url: str,
    against: str | None,
    num_draft_tokens: int | None,
    options: dict[str, Any],
) -> Sequence[Side]:
    """The baseline first: the other server, or the same one without speculation."""
    from specpipe.evaluate.bench.sides import named_apart, open_side, without_and_with
    from specpipe.evaluate.endpoints import takes_draft_length

    variable = options["api_key_variable"]
    if variable is not None and variable not in os.environ:
        raise click.UsageError(f"--api-key-variable: {variable} is not set.")
    api_key = None if variable is None else os.environ[variable]

    def opened(url: str, which: str = "") -> Side:
        model, metrics_url = options[f"{which}model"], options[f"{which}metrics_url"]
        side = open_side(url, model=model, metrics_url=metrics_url, api_key=api_key)
        stack.callback(side.endpoint.close)
        return side

    side = opened(url)
    if against is not None:
        return named_apart(opened(against, "against_"), side)
    if takes_draft_length(side.endpoint):
        return without_and_with(side, num_draft_tokens)
    if num_draft_tokens is not None:
        raise click.UsageError(f"{url} takes no draft length: no --num-draft-tokens.")
    log(f"{url} takes no draft length: to compare it with another server, give --against")
    return [side]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
