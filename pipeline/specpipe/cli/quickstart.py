"""`specpipe quickstart`: the pair that comes with specpipe, from its files to a served answer."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from specpipe.cli.options import OutputFolder
from specpipe.cli.output import shown
from specpipe.cli.progress import BuildProgress, log, log_shown

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig
    from specpipe.triton.client import Client
    from specpipe.triton.server.server import Server

_NUM_PROMPTS = 8  # that are verified, with the defaults of `verify` otherwise. A guess.
_SET = "code"
_NUM_COMPARED, _MAX_TOKENS, _NUM_ROUNDS = 6, 96, 3  # some 15 s on two cores


@click.command()
@click.option(
    "--output",
    type=OutputFolder(),
    default=Path("specpipe-quickstart"),
    help="Folder for the pair, its YAML and its engines.",
)
@click.option(
    "--runtime",
    type=click.Choice(["torch", "tensorrt", "tensorrt_llm"]),
    show_default="torch, without a verification",
    help="What builds and serves the pair, which is then verified: the last line is the verdict.",
)
@click.option(
    "--backend",
    type=click.Choice(["tensorrt", "pytorch"]),
    show_default="tensorrt where trtllm-build is on PATH, else pytorch",
    help="The backend of runtime tensorrt_llm.",
)
def quickstart(output: Path, runtime: str | None, backend: str | None) -> None:
    """Build, serve and ask a small pair that comes with specpipe.

    Writes the pair (13 MB) and its YAML into a folder, builds engines there, starts a Triton on
    free ports of 127.0.0.1, asks it as any client would, compares the target alone with its draft,
    and with copying from the text besides, and ends the server. A second run builds nothing; files
    of yours are left as they are.

    With --runtime the comparison is that of `specpipe verify`: exit code 0 says that this machine
    builds and serves with that runtime, and that the answers are those of the target alone.
    """
    from specpipe.build import execution, planning, repositories
    from specpipe.build import quickstart as pair
    from specpipe.build.load import load_config
    from specpipe.evaluate.serving import served
    from specpipe.stage import naming
    from specpipe.triton.client import Client

    if backend is not None and runtime != "tensorrt_llm":
        raise click.UsageError("--backend has no effect without --runtime tensorrt_llm.")
    settings: dict[str, str] = {}
    if runtime is not None:
        settings = pair.settings_here(runtime)
    if backend is not None:
        settings["engine.tensorrt_llm.backend"] = backend
    pair.require_libraries()
    overrides = [f"{key}={value}" for key, value in settings.items()]
    words = ["--config", str(output / pair.CONFIG)]
    options = shlex.join(words + [word for text in overrides for word in ("--set", text)])
    click.echo(f"--- the pair and its YAML go into {output}")
    for path in pair.write_files(output):
        click.echo(f"{path} is not the one that comes with specpipe; it is left as it is")

    click.echo(f"\n--- specpipe build {options}")
    config = load_config(output / pair.CONFIG, overrides)
    with naming("the pair is not built"), log_shown():
        execution.run(planning.plan(config), BuildProgress())
    repository = repositories.built_repository(config)

    click.echo(f"\n--- a Triton on free ports, as specpipe serve {options}")
    click.echo("starting Triton ...")
    with (
        naming("the pair is built, but not served"),
        served(repository) as server,
        Client(server.grpc_url) as client,
    ):
        _ask(server, client)
        if runtime is None:
            _compare(repository, client)
    if runtime is not None:
        click.echo(f"\n--- specpipe verify {options} --limit {_NUM_PROMPTS}")
        with naming("the pair is built and served, but not verified"):
            _verify(config, settings)


def _ask(server: Server, client: Client) -> None:
    from specpipe.build import quickstart as pair
    from specpipe.triton.client import Client

    click.echo(f"ready at {server.grpc_url}\n\n--- a streamed request over gRPC")
    click.echo(pair.PROMPTS[0], nl=False)
    try:
        for chunk in client.stream(pair.PROMPTS[0], max_tokens=48):
            click.echo(chunk.text, nl=False)
    finally:
        click.echo()

    click.echo("\n--- a whole request over HTTP")
    with Client(server.http_url) as http_client:
        answer = http_client.generate(pair.PROMPTS[1], max_tokens=48)
    click.echo(pair.PROMPTS[1] + answer.text)


def _compare(repository: Path, client: Client) -> None:
    """Prints what draft and copying gain, and why. A second server has the other `prompt_lookup`.

    That is a setting of a pair, not of a request, as in other servers.
    """
    from specpipe.evaluate import gains
    from specpipe.evaluate.prompts import load_prompts
    from specpipe.evaluate.serving import served
    from specpipe.evaluate.verification.repositories import write_with
    from specpipe.runtimes.pair_file import read_pair
    from specpipe.triton.client import Client

    texts = [prompt.text for prompt in load_prompts(_SET).prompts if prompt.text]
    alone = gains.Way("target alone", client, num_draft_tokens=0)
    prompts, num_left_out = gains.that_go_on(alone, texts, _NUM_COMPARED)
    click.echo(
        f"\n--- {len(prompts)} prompts of the set {_SET}, up to {_MAX_TOKENS} tokens each, "
        f"greedy, one at a time, {_NUM_ROUNDS} rounds in turns"
    )
    click.echo(f"left out: {num_left_out} others, to which the target says nothing\n")
    options = read_pair(repository).options
    other = replace(options, prompt_lookup=not options.prompt_lookup)
    with (
        TemporaryDirectory() as folder,
        served(write_with(repository, Path(folder, "model_repo"), other)) as server,
        Client(server.grpc_url) as other_client,
    ):
        by_copying = {options.prompt_lookup: client, other.prompt_lookup: other_client}
        ways = (
            replace(alone, client=by_copying[False]),
            gains.Way("with the draft", by_copying[False]),
            gains.Way("with draft and copying", by_copying[True]),
        )
        compared = gains.compare(ways, prompts, max_tokens=_MAX_TOKENS, num_rounds=_NUM_ROUNDS)
    for line in (*gains.table(compared), "", *gains.explained(compared)):
        click.echo(line)


def _verify(config: PipelineConfig, settings: Mapping[str, str]) -> None:
    """Prints what `specpipe verify` does, and a last line: the verdict, or what failed."""
    from specpipe.evaluate.verification.outcome import VerifyOptions
    from specpipe.evaluate.verification.run import verify
    from specpipe.evaluate.verification.summary import summary

    verification = verify(config, VerifyOptions(limit=_NUM_PROMPTS), report=log)
    *lines, _ = summary(verification)
    for line in lines:
        click.echo(line)
    findings = verification.findings
    if findings.reason is not None:
        raise click.ClickException(
            f"the pair is built and served, but not lossless: {findings.reason}: please report "
            f"it, with {shown(verification.path)} and what `specpipe doctor` prints"
        )
    what = ", ".join(
        f"{key.rpartition('.')[2]} {value}" for key, value in settings.items() if key != "name"
    )
    ties = f", up to numerical ties ({findings.num_ties})" if findings.num_ties else ""
    click.echo(f"verdict: served and lossless{ties}: {what}")
