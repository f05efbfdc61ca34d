"""`specpipe serve`: the built pair behind Triton, until it is stopped."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specpipe.cli.gateway import DOOR_DEFAULTS, door_options, door_settings, require_gateway
from specpipe.cli.options import Command, load, open_store_of, pair_options
from specpipe.cli.output import shown
from specpipe.cli.progress import log

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig
    from specpipe.runtimes.launch import LaunchMode
    from specpipe.triton.server.launcher import Door, ServeOptions, Server


def _port_option(name: str, default: int, service: str) -> Callable[[Command], Command]:
    return click.option(
        f"--{name}-port",
        metavar="PORT",
        default=default,
        help=f"Port for {service}; 0: any free one.",
    )


@click.command()
@pair_options
@click.option(
    "--promoted",
    "is_promoted",
    is_flag=True,
    help="Serve the promoted version, fetched from release.store where it is not here.",
)
@click.option(
    "--version",
    "number",
    type=click.IntRange(min=1),
    metavar="N",
    help="Serve a published version, promoted or not.",
)
@click.option("--host", metavar="HOST", default="127.0.0.1", help="Address to listen on.")
@_port_option("http", 8000, "HTTP")
@_port_option("grpc", 8001, "gRPC")
@_port_option("metrics", 8002, "metrics, over HTTP")
@click.option(
    "--no-http",
    "allow_http",
    flag_value=False,
    default=True,
    show_default=False,
    help="Listen for gRPC alone: most known holes of older tritonservers are in HTTP.",
)
@click.option(
    "--openai",
    "openai_listen",
    metavar="[HOST:]PORT",
    help="Answer OpenAI's clients there, too, on this machine alone where no HOST is given.",
)
@door_options("With --openai: ")
@click.option(
    "--allow-known-holes",
    is_flag=True,
    help="Listen for other machines even where clients can end this tritonserver (known holes).",
)
@click.option(
    "--mpi-mode",
    type=click.Choice(["auto", "leader", "orchestrator"]),
    default="auto",
    help="How the ranks of TensorRT-LLM's engines start: mpirun starts them, or the server does.",
)
@click.option(
    "--allow-unknown-engine-facts",
    is_flag=True,
    help="Serve engines of which specpipe cannot tell whether they fit this machine.",
)
@click.option(
    "--allow-unverified",
    is_flag=True,
    help="Serve a pair that failed its verification, or was changed since it was verified.",
)
@click.option(
    "--allow-unsigned",
    is_flag=True,
    help="Serve what nobody signed, even where release.require_signature is true.",
)
@click.option(
    "--verify-files",
    is_flag=True,
    help="Hash every file of the repository, and not only what was touched since it was built.",
)
@click.option(
    "--allow-damaged", is_flag=True, help="Serve a repository whose files are not what was built."
)
@click.option(
    "--verbose", is_flag=True, help="Show all that Triton logs, not only warnings and errors."
)
def serve(
    config_path: Path,
    overrides: Sequence[str],
    is_promoted: bool,
    number: int | None,
    mpi_mode: LaunchMode,
    allow_unknown_engine_facts: bool,
    allow_unverified: bool,
    allow_unsigned: bool,
    verify_files: bool,
    allow_damaged: bool,
    verbose: bool,
    openai_listen: str | None,
    **options: Any,
) -> None:
    """Serve a pair with Triton until it is stopped.

    That is what is built here; with --promoted, or --version, a published version. A repository
    whose files are not what was built is refused. So is a pair that `specpipe verify` found at
    fault, or that was changed since it was verified; one that never was verified is served.
    """
    from specpipe.machine.gpus import gpus_here
    from specpipe.release import starting
    from specpipe.release.trust.serving import check_signature
    from specpipe.triton.server import launcher
    from specpipe.triton.server.log_lines import is_worth_showing

    if is_promoted and number is not None:
        raise click.UsageError("Give either --promoted or --version.")
    is_version = is_promoted or number is not None
    for option, is_given in (
        ("--allow-damaged", allow_damaged),
        ("--allow-unverified", allow_unverified),
    ):
        if is_version and is_given:
            raise click.UsageError(f"{option} has no effect on a published version.")

    door_values = {name: options.pop(name) for name in DOOR_DEFAULTS}
    if openai_listen is None and door_values != DOOR_DEFAULTS:
        raise click.UsageError("Options of the door have no effect without --openai.")
    if openai_listen is not None:
        require_gateway()

    def announce(server: launcher.Server) -> None:
        if is_promoted:
            starting.started(config, version)
        models = ", ".join(sorted(path.parent.name for path in repository.glob("*/1")))
        log(f"{config.name}: {models}; started in {time.monotonic() - started:.1f} s")
        urls = [*server.urls, server.metrics_url, *door_urls]
        click.echo(f"ready: {' '.join(urls)}")

    def log_of_triton(line: str) -> None:
        if verbose or is_worth_showing(line, has_gpu=has_gpu):
            log(line)

    config = load(config_path, overrides)
    if is_version:
        store = None if config.release.store is None else open_store_of(config, None)
        version = starting.version_to_serve(config, store, number, verify=verify_files, log=log)
        number, repository = version.number, version.repository
    else:
        repository = _built(
            config,
            verify_files=verify_files,
            allow_damaged=allow_damaged,
            allow_unverified=allow_unverified,
        )
    check_signature(config, repository, allow_unsigned=allow_unsigned, log=log)
    serve_options = launcher.ServeOptions(**options)
    door: Door = launcher.no_door
    door_urls: tuple[str, ...] = ()
    if openai_listen is not None:
        door, door_urls = _door(config, repository, serve_options, openai_listen, door_values)
    has_gpu = bool(gpus_here())
    log("starting Triton ...")
    started = time.monotonic()
    launcher.serve(
        repository,
        serve_options,
        report=log,
        number=number,
        artifacts_dir=config.artifacts_dir,
        mpi_mode=mpi_mode,
        allow_unknown_engine_facts=allow_unknown_engine_facts,
        build_command=shlex.join(
            ["specpipe", "build", "--config", str(config_path)]
            + [word for override in overrides for word in ("--set", override)]
        ),
        log=log_of_triton,
        on_ready=announce,
        door=door,
    )


def _door(
    config: PipelineConfig,
    repository: Path,
    options: ServeOptions,
    listen: str,
    values: Mapping[str, Any],
) -> tuple[Door, tuple[str, ...]]:
    """Returns what stands before the server, and its URL, on a port that is kept from now on."""
    from specpipe.gateway.child import GatewayChild, reserve
    from specpipe.gateway.listening import url_of
    from specpipe.triton.server.addresses import check_apart, resolve

    settings = door_settings(config, repository, listen, (), values)
    listener = reserve(settings)
    check_apart(resolve(options), *listener.getsockname()[:2])

    def open_door(server: Server, is_interrupted: Callable[[], bool]) -> GatewayChild:
        behind = settings.model_copy(update={"urls": (server.grpc_url,)})
        return GatewayChild(
            behind, listener, secret=server.secret, log=log, is_interrupted=is_interrupted
        )

    return open_door, (url_of(listener),)


def _built(
    config: PipelineConfig, *, verify_files: bool, allow_damaged: bool, allow_unverified: bool
) -> Path:
    """Returns the repository that is built here, where it may be served."""
    from specpipe.build import repositories
    from specpipe.errors import RepositoryError
    from specpipe.evaluate.verification import record

    repository = repositories.find_repository(config, verify=verify_files)
    if verify_files:
        log(f"{shown(repository.folder)}: {repository.hashed}")
    if repository.fault is not None:
        if not allow_damaged:
            raise RepositoryError(f"{repository.fault}, or serve it as it is with --allow-damaged")
        log(f"warning: {repository.fault}; allowed by --allow-damaged")
    for line in repositories.outdated(config):
        log(f"warning: not what {config.source} says now: {line}")
    if (fault := record.verification_fault(config.artifacts_dir)) is not None:
        if not allow_unverified:
            raise RepositoryError(f"{fault}, or serve it as it is with --allow-unverified")
        log(f"warning: {fault}; allowed by --allow-unverified")
    return repository.folder
