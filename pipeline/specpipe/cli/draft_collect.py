"""`specpipe draft collect`: what a target answers to the user's prompts, to train a draft on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specpipe.cli.bench_servers import api_key_option, check_api_key, url_options
from specpipe.cli.options import (
    NumberRange,
    OutputFolder,
    chat_option,
    cut_options,
    json_option,
    limit_option,
    load,
    optional_pair_options,
)
from specpipe.cli.output import print_result, shown
from specpipe.cli.progress import log
from specpipe.errors import plural

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig
    from specpipe.training.answering import Target
    from specpipe.training.collecting import CollectOptions
    from specpipe.training.collection import CollectionInfo


@click.command()
@optional_pair_options
@click.option(
    "--prompts",
    required=True,
    help="A .jsonl or .txt file, or a set by its name (chat, code, summarization), which then "
    "judges the draft no more.",
)
@limit_option
@chat_option
@url_options
@api_key_option
@click.option(
    "--as-text",
    is_flag=True,
    help="Send prompts as text and messages, not as token ids, to a server that takes no ids.",
)
@click.option(
    "--tokenizer",
    "tokenizer_dir",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder of the target's tokenizer. Left out: that of the pair.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=512,
    help="Tokens of an answer at most, where its prompt does not say: as many as are served.",
)
@click.option(
    "--temperature",
    "temperatures",
    type=NumberRange(min=0),
    multiple=True,
    default=(0.0,),
    show_default="0",
    help="How answers are drawn; may be given several times. 0: greedy, once for each prompt.",
)
@click.option(
    "--samples",
    "num_samples",
    type=click.IntRange(min=1),
    default=1,
    help="Answers to each prompt at each temperature above 0.",
)
@cut_options
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    help="Decides sampled answers: each has a seed of its own, of this and its prompt.",
)
@click.option(
    "--top-log-probs",
    "num_top_log_probs",
    type=click.IntRange(0, 20),
    default=0,
    help="So many of the target's likeliest tokens with each token, and their log-probabilities; "
    "the others are left out.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    help="Questions that are open at a time. Left out: engine.max_batch_size, else 8.",
)
@click.option("--licence", metavar="TEXT", help="The licence of the prompts, to be noted.")
@click.option(
    "--output",
    type=OutputFolder(),
    help="Folder of the collection. Left out: collection/ beside the built repository.",
)
@json_option
def collect(
    config_path: Path | None,
    overrides: Sequence[str],
    url: str | None,
    model: str | None,
    api_key_variable: str | None,
    tokenizer_dir: Path | None,
    concurrency: int | None,
    licence: str | None,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Collect the target's own answers to your prompts.

    With --config alone the built pair answers in this process; with --url a server does. Each
    prompt is asked once greedily, and --samples times at each --temperature above 0. What is
    collected are token ids, in a folder that `specpipe draft train` reads.

    An interrupted run goes on where it ended when it is given again, and asks anew what failed. A
    folder that was collected from another target, with other prompts or other settings, is refused.
    """
    from specpipe.training import answering
    from specpipe.training.collecting import collect as ask
    from specpipe.training.collection_writer import open_writer

    _check(config_path, url, tokenizer_dir, output, options)
    check_api_key(api_key_variable)
    settings = _settings(options)
    config = None if config_path is None else load(config_path, overrides)
    num_prompts = sum(1 for _ in settings.iterate_prompts())
    target = _target(config, url, model, tokenizer_dir)
    folder = output
    if folder is None:
        assert config is not None
        folder = config.artifacts.collection
    info = _info(target, settings, licence)
    with open_writer(folder, info) as writer:
        if writer.info.num_answers:
            so_far = plural(writer.info.num_answers, "answer")
            log(f"going on with {shown(folder)}: {so_far} so far")
        api_key = None if api_key_variable is None else os.environ[api_key_variable]
        with closing(answering.open_target(target, url, model, api_key)) as endpoint:
            if answering.needs_text(endpoint) and not settings.as_text:
                raise click.UsageError(f"{url} takes no token ids: give --as-text.")
            collected = ask(
                endpoint,
                target.tokenizer,
                settings,
                writer,
                num_prompts=num_prompts,
                concurrency=concurrency or target.num_streams,
                max_seq_len=target.max_seq_len,
            )
        info = writer.info
    print_result(asdict(info), _summary(info, folder), as_json=as_json)
    if (fault := collected.fault()) is not None:
        raise click.ClickException(f"{fault}; the same command asks them again")


def _check(
    config: Path | None,
    url: str | None,
    tokenizer: Path | None,
    output: Path | None,
    options: dict[str, Any],
) -> None:
    """Raises UsageError for options that do not go together."""
    if config is None and url is None:
        raise click.UsageError("Give --config, --url or both.")
    if config is None and (tokenizer is None or output is None):
        raise click.UsageError("--url without --config needs --tokenizer and --output.")
    if url is None and (tokenizer is not None or options["as_text"]):
        raise click.UsageError("--tokenizer and --as-text need --url.")
    is_sampled = any(options["temperatures"])
    if not is_sampled and (options["top_k"] or options["top_p"] < 1.0):
        raise click.UsageError(
            "--top-k and --top-p need --temperature: greedy has no use for them."
        )
    if not is_sampled and options["num_samples"] > 1:
        raise click.UsageError("--samples needs a --temperature above 0.")


def _settings(options: dict[str, Any]) -> CollectOptions:
    from specpipe.training.collecting import CollectOptions

    temperatures = tuple(dict.fromkeys(options.pop("temperatures")))
    return CollectOptions(temperatures=temperatures, **options)


def _target(
    config: PipelineConfig | None, url: str | None, model: str | None, tokenizer: Path | None
) -> Target:
    from specpipe.training.answering import built_target, served_target

    if url is not None:
        return served_target(url, model, tokenizer=tokenizer, config=config)
    assert config is not None
    return built_target(config)


def _info(target: Target, settings: CollectOptions, licence: str | None) -> CollectionInfo:
    from specpipe.evaluate.prompts import prompts_path
    from specpipe.machine import provenance
    from specpipe.machine.manifest import record_file
    from specpipe.training.collection import TAIL, CollectionInfo, tokenizer_digest

    num_listed = settings.num_top_log_probs
    return CollectionInfo(
        answered_by=target.answered_by,
        tokenizer_digest=tokenizer_digest(target.tokenizer),
        settings=settings.settings(),
        prompts={
            "source": settings.prompts,
            "digest": record_file(prompts_path(settings.prompts)).sha256,
        },
        licences={"prompts": licence, "target": target.licence},
        versions=provenance.versions(),
        made_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        top_log_probs={"count": num_listed, "tail": TAIL} if num_listed else None,
    )


def _summary(info: CollectionInfo, folder: Path) -> Iterator[str]:
    yield (
        f"{plural(info.num_answers, 'answer')} of {plural(info.num_tokens, 'token')} to "
        f"{plural(info.num_prompts, 'prompt')}"
    )
    for number, noun, what in (
        (info.num_duplicates, "answer", " left out, as the same prompt has the same one already"),
        (info.num_empty, "empty answer", " left out"),
        (info.num_from_text, "answer", " came as text alone: the ids are the tokenizer's"),
        (info.num_failed, "question", " without an answer: left-out.jsonl says why"),
    ):
        if number:
            yield f"{plural(number, noun)}{what}"
    licences = info.licences
    declared = ", ".join((licences["target"] or {}).get("declared", ())) or "not known"
    yield f"licences: prompts {licences['prompts'] or 'not given'}; target {declared}"
    yield f"written: {shown(folder)}"
