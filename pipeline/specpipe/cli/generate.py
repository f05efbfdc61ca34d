"""`specpipe generate`: one question to a running server."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from specpipe.cli.options import json_option
from specpipe.cli.output import print_json
from specpipe.errors import ConfigError

if TYPE_CHECKING:
    from specpipe.triton.client import Completion

_MAX_PROMPT_BYTES = 1 << 26  # far beyond `serving.limits.max_prompt_bytes` where nobody set it


@click.command()
@click.argument("prompt", required=False)
@click.option(
    "--file",
    "prompt_file",
    type=click.File("rb"),
    help="Read the prompt from a file; `-` is standard input.",
)
@click.option(
    "--url",
    metavar="URL",
    default="http://127.0.0.1:8000",
    help="The server: http://HOST:PORT or grpc://HOST:PORT.",
)
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message.")
@click.option("--stream", is_flag=True, help="Print the text as it comes.")
@click.option(
    "--max-tokens",
    metavar="N",
    type=int,
    default=128,
    help="Tokens of the answer at most.",
)
@click.option(
    "--num-draft-tokens",
    metavar="K",
    type=int,
    help="Draft tokens of every step; 0: the target alone; left out: as many as pay.",
)
@click.option("--temperature", type=float, help="0: greedy. Left out: greedy.")
@click.option(
    "--top-k", metavar="K", type=int, help="Sample from the K most likely tokens; 0: from all."
)
@click.option(
    "--top-p",
    type=float,
    help="Sample from the most likely tokens that together have this probability; 1: from all.",
)
@click.option(
    "--min-p",
    type=float,
    help="Leave out tokens less likely than this share of the likeliest; 0: none.",
)
@click.option("--seed", type=int, help="Makes sampled output repeatable.")
@click.option(
    "--stop", "stop_words", metavar="TEXT", multiple=True, help="End before this text; repeatable."
)
@json_option
def generate(
    prompt: str | None,
    prompt_file: Any,
    url: str,
    chat: bool,
    stream: bool,
    stop_words: Sequence[str],
    as_json: bool,
    **settings: Any,
) -> None:
    """Ask a running server; the prompt is PROMPT, --file, or standard input.

    What the answer took goes to standard error: tokens, time, acceptance, and why drafting was off.
    """
    from specpipe.triton.client import Client

    text = _prompt(prompt, prompt_file)
    if stop_words:
        settings["stop_words"] = list(stop_words)
    if chat:
        settings["messages"] = [{"role": "user", "content": text}]
    with Client(url) as client:
        plain_prompt = None if chat else text
        start = time.perf_counter()
        if stream:
            completions = client.stream(plain_prompt, **settings)
        else:
            completions = iter([client.generate(plain_prompt, **settings)])
        has_open_line = False
        try:
            for completion in completions:
                if as_json:
                    print_json(_completion_json(completion), indent=None)
                else:
                    click.echo(completion.text, nl=False)
                    has_open_line = True
        finally:
            if has_open_line:
                click.echo()  # whether the text is whole or broke off
    if not as_json:
        click.echo(_summary(completion, time.perf_counter() - start), err=True)


def _prompt(prompt: str | None, file: Any) -> str:
    if prompt is not None and file is not None:
        raise click.UsageError("Give the prompt once: as PROMPT or with --file.")
    if prompt is not None:
        return prompt
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise click.UsageError("Missing prompt: give PROMPT or --file, or pipe it in.")
    # As bytes: the text would be read in the terminal's encoding, and with other line ends.
    source = sys.stdin.buffer if file is None else file
    data = source.read(_MAX_PROMPT_BYTES + 1)
    if len(data) > _MAX_PROMPT_BYTES:
        raise ConfigError(
            f"the prompt in {source.name} has more than {_MAX_PROMPT_BYTES} bytes: no server takes "
            "as many"
        )
    try:
        return str(data, "utf-8-sig")
    except UnicodeDecodeError as exc:
        raise ConfigError(
            f"the prompt in {source.name} is not text in UTF-8 (byte {exc.start})"
        ) from exc


def _completion_json(completion: Completion) -> dict[str, Any]:
    values = dataclasses.asdict(completion)
    return {key: value for key, value in values.items() if value not in (None, ())}


def _summary(completion: Completion, seconds: float) -> str:
    """Returns one line of what the last response reports; `seconds` is what the answer took."""
    statistics = completion.statistics
    if statistics is None:
        return f"finish reason: {completion.finish_reason}"
    parts = [
        f"finish reason: {completion.finish_reason}",
        f"{statistics.num_output_tokens} tokens in {statistics.num_steps} steps",
        f"{statistics.num_output_tokens / seconds:.1f} tokens/s",
    ]
    if statistics.draft_status is not None:
        parts.append(f"draft status: {statistics.draft_status}")
    if statistics.total_draft_tokens:
        accepted = f"{statistics.total_accepted_draft_tokens}/{statistics.total_draft_tokens}"
        parts.append(f"acceptance rate {statistics.acceptance_rate:.2f} ({accepted})")
    return " · ".join(parts)
