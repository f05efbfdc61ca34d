"""`specpipe migrate`: a YAML from a config for engines, or from another server's settings."""

from __future__ import annotations

from pathlib import Path

import click

from specpipe.cli.output import shown


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="A YAML for runtime tensorrt_llm with backend tensorrt, to be one for backend pytorch.",
)
@click.option(
    "--options",
    "options_path",
    type=click.Path(path_type=Path),
    help="A YAML that trtllm-serve has its options from, as extra_llm_api_options.yaml.",
)
@click.option("--model", metavar="MODEL", help="The target of --options: a folder or a hub id.")
@click.option(
    "--draft",
    metavar="MODEL",
    help="The draft, where the command line or --options names none: a folder or a hub id.",
)
@click.option(
    "--runtime",
    type=click.Choice(["torch", "tensorrt", "tensorrt_llm"]),
    help="What serves the pair; left out: tensorrt_llm for trtllm-serve, else torch.",
)
@click.option(
    "--to",
    "version",
    metavar="VERSION",
    help="The release of TensorRT-LLM to serve with, as 1.2.1; left out: the config's own.",
)
@click.option("--name", metavar="NAME", help="Name of the pair; left out: the model's.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; left out: NAME.yaml, or the name of --config with -pytorch.",
)
def migrate(
    command: tuple[str, ...],
    config_path: Path | None,
    options_path: Path | None,
    model: str | None,
    draft: str | None,
    runtime: str | None,
    version: str | None,
    name: str | None,
    output: Path | None,
) -> None:
    """Write a YAML for what another server runs, or for TensorRT-LLM's backend pytorch.

    COMMAND is the command line of trtllm-serve, vLLM or SGLang, after `--`, as in `specpipe migrate
    -- vllm serve ORG/MODEL --max-model-len 4096`. Instead of it, --config takes a config for
    TensorRT-LLM's engines, and --options the YAML of trtllm-serve. Prints which flags are carried,
    what they became, which are not carried and why, and what is different.
    """
    from specpipe.build.migrate.engines import from_engines
    from specpipe.build.migrate.other_server import Wanted, from_command_line, from_options

    if [bool(command), config_path is not None, options_path is not None].count(True) != 1:
        raise click.UsageError("Give one of --config, --options, or a command line after --.")
    if (model is None) != (options_path is None):
        raise click.UsageError("--options and --model belong together.")
    if config_path is not None:
        if draft or runtime or name:
            raise click.UsageError("--draft, --runtime and --name have no effect with --config.")
        migration = from_engines(config_path, output, version)
    else:
        wanted = Wanted(runtime, version, draft, name, output)
        migration = (
            from_command_line(command, wanted)
            if options_path is None or model is None
            else from_options(options_path, model, wanted)
        )
    click.echo(shown(migration.output))
    for title, lines in migration.sections.items():
        if lines:
            click.echo(f"{title}:")
        for line in lines:
            click.echo(f"  {line}")
