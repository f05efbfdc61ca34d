"""`specpipe quickstart`: the pair that comes with specpipe, from its files to a served answer."""

from __future__ import annotations

import shlex
from pathlib import Path

import click


@click.command()
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("specpipe-quickstart"),
    help="Folder for the pair, its YAML and its engines.",
)
def quickstart(output: Path) -> None:
    """Build, serve and ask a small pair that comes with specpipe.

    Writes the pair (13 MB) and its YAML into a folder, builds engines there, starts a Triton on
    free ports of 127.0.0.1, asks it as any client would, compares speculation with the target
    alone, and ends the server. A second run builds nothing; files of yours are left as they are.
    """
    from specpipe.build import execution, planning, repositories
    from specpipe.build import quickstart as pair
    from specpipe.build.load import load_config
    from specpipe.cli.progress import BuildProgress
    from specpipe.triton.client import Client
    from specpipe.triton.server import launcher

    pair.require_libraries()
    option = f"--config {shlex.quote(str(output / pair.CONFIG))}"
    click.echo(f"--- the pair and its YAML go into {output}")
    for path in pair.write_files(output):
        click.echo(f"{path} is not the one that comes with specpipe; it is left as it is")

    click.echo(f"\n--- specpipe build {option}")
    config = load_config(output / pair.CONFIG)
    execution.run(planning.plan(config), BuildProgress())
    repository = repositories.built_repository(config)

    click.echo(f"\n--- a Triton on free ports, as specpipe serve {option}")
    click.echo("starting Triton ...")
    with (
        launcher.running(repository) as server,
        Client(server.grpc_url) as client,
    ):
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

        click.echo(
            f"\n--- {len(pair.PROMPTS)} prompts, {pair.MAX_TOKENS} tokens each, greedy, "
            "one at a time"
        )
        alone, speculative = pair.compare(client)
    for name, total in (("target alone", alone), ("speculative", speculative)):
        click.echo(f"{name:14} {total.rate:7.0f} tokens/s")
    click.echo(f"ratio          {speculative.rate / alone.rate:7.2f}")
    if speculative.drafted:
        click.echo(
            f"acceptance rate {speculative.accepted / speculative.drafted:.2f}, "
            f"acceptance length {1 + speculative.accepted / speculative.steps:.2f}"
        )
    else:
        click.echo(f"nothing was drafted: {', '.join(sorted(speculative.draft_statuses))}")
