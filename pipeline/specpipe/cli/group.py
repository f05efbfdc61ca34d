"""The command `specpipe`: parses, calls and prints.

Results go to stdout, progress and errors to stderr. Exit codes: 0, 1 (refused or failed, with one
sentence that says what to do), 2 (usage), 130 (Ctrl-C), 143 (SIGTERM; see signals.py). A traceback
is for `--debug` alone. What a command needs is imported when it runs, so that `--help` is quick and
no command needs another one's libraries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specpipe import __version__, failures
from specpipe.cli.bench import bench
from specpipe.cli.nightly import nightly
from specpipe.cli.options import config_options
from specpipe.cli.progress import Progress, log, log_shown
from specpipe.cli.quickstart import quickstart
from specpipe.cli.report import report
from specpipe.cli.tune import tune
from specpipe.cli.verify import verify
from specpipe.errors import ConfigError, to_sentence

if TYPE_CHECKING:
    from specpipe.build.pipeline import Checked, StageReport
    from specpipe.config.sections import PipelineConfig
    from specpipe.runtimes.launch import LaunchMode
    from specpipe.triton.client import Completion


class _Group(click.Group):
    """Turns failures into one sentence, and Ctrl-C into 130."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            super().main(*args, **kwargs)
        except SystemExit as exc:
            reason = failures.flush_stdout()
            if reason is not None and not exc.code:
                click.echo(f"Error: {reason}", err=True)
                sys.exit(1)
            raise
        except OSError as exc:  # what it would say cannot be written
            failures.flush_stdout()
            with contextlib.suppress(OSError):
                click.echo(f"Error: {to_sentence(exc)}", err=True)
            sys.exit(1)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Wraps the commands' summaries, which click would cut."""
        whole = 1000  # characters
        summaries = [
            (name, command.get_short_help_str(limit=whole))
            for name, command in sorted(self.commands.items())
        ]
        with formatter.section("Commands"):
            formatter.write_dl(summaries)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as exc:
            if isinstance(exc, OSError) and exc.errno == errno.EPIPE:
                raise  # click's own: nobody reads on
            if ctx.params["debug"]:
                traceback.print_exc()
            raise click.ClickException(failures.sentence(exc)) from exc
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(130)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="specpipe")
@click.option("--debug", is_flag=True, help="Show the traceback of a failure.")
def main(debug: bool) -> None:
    """Two checkpoints in, a draft–target pair served by Triton out."""


_config_options = config_options(
    "; paths in it are relative to it.", "as in engine.max_batch_size=4"
)
_small_files_option = click.option(
    "--small-files",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder with the configs and tokenizers of hub ids, in ORG--NAME/; no hub is asked.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


@main.command()
@click.argument("draft")
@click.argument("target")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; left out: NAME.yaml.",
)
@click.option("--name", metavar="NAME", help="Name of the pair; left out: the target's.")
def init(draft: str, target: str, output: Path | None, name: str | None) -> None:
    """Check a pair and write a commented YAML for it.

    DRAFT and TARGET are folders or ids on the Hugging Face hub; only their small files are read.
    """
    from specpipe.build.init import write_config

    click.echo(write_config(draft, target, output=output, name=name))


@main.command()
@_config_options
@click.option("--dry-run", is_flag=True, help="Print each stage that would run, and why.")
@click.option(
    "--verify-inputs",
    is_flag=True,
    help="Hash every checkpoint and artifact, and not only what looks changed.",
)
@_small_files_option
@_json_option
def build(
    config_path: Path,
    overrides: Sequence[str],
    dry_run: bool,
    verify_inputs: bool,
    small_files: Path | None,
    as_json: bool,
) -> None:
    """Build engines and Triton repository; do only what is not done yet."""
    from specpipe.build import pipeline

    if small_files is not None and not dry_run:
        raise click.UsageError("--small-files has no weights to build from: add --dry-run.")
    config = _load(config_path, overrides)
    stages = pipeline.plan(config, small_files=small_files)
    repository = pipeline.repository_dir(config)
    if dry_run:
        reports = pipeline.preview(stages, verify_inputs=verify_inputs)
        if as_json:
            _print_json({"stages": [_stage_json(report) for report in reports]})
        else:
            for report in reports:
                for reason in report.reasons or ("up to date",):
                    click.echo(f"{report.stage}: {reason}")
                for command in report.commands:
                    click.echo(f"  $ {shlex.join(command)}")
        return
    with log_shown():
        reports = pipeline.run(stages, Progress(), verify_inputs=verify_inputs)
    if as_json:
        _print_json(
            {
                "repository": str(repository),
                "stages": [
                    {**_stage_json(report), "duration_s": round(report.duration_s, 3)}
                    for report in reports
                ],
            }
        )
    else:
        click.echo(_shown(repository))


@main.command()
@_config_options
@click.option(
    "--gpu",
    metavar="NAME_OR_GB",
    help="Plan memory for this GPU, as H100 or 24; left out: those of this machine.",
)
@_small_files_option
@_json_option
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
    from specpipe.build import pipeline
    from specpipe.machine import gpus

    config = _load(config_path, overrides)
    found = gpus.gpus_here() if gpu is None else (gpus.find_gpu(gpu),)
    checked = pipeline.check(config, small_files=small_files, gpus=found)
    plan = checked.plan
    if gpu is not None and plan is None:
        raise click.UsageError("--gpu has no effect: engine.device is cpu.")
    if as_json:
        _print_json(_checked_json(checked))
    else:
        _print_checked(checked)
    if plan is not None and not plan.fits:
        number = next(on_gpu.number for on_gpu in plan.gpus if not on_gpu.fits)
        raise click.ClickException(
            f"the pair does not fit on GPU {number}: lower engine.max_batch_size or "
            "engine.max_seq_len" + (", or choose a format that would fit" if plan.changes else "")
        )


def _checked_json(checked: Checked) -> dict[str, Any]:
    memory = {role: dataclasses.asdict(found) for role, found in checked.memory.items()}
    plan = None if checked.plan is None else checked.plan.to_json()
    return {**dataclasses.asdict(checked.contract), "memory": memory, "memory_plan": plan}


def _print_checked(checked: Checked) -> None:
    from specpipe.build import memory_plan

    contract = checked.contract
    click.echo(
        f"draft and target fit: {contract.num_used_token_ids} token ids in use; embedding rows: "
        f"draft {contract.draft_vocab_size}, target {contract.target_vocab_size}"
    )
    click.echo(f"context: draft {contract.draft_max_seq_len}, target {contract.target_max_seq_len}")
    click.echo(f"end ids: {', '.join(map(str, contract.end_token_ids)) or 'none'}")
    for role, estimate in checked.memory.items():
        click.echo(f"memory of the {role}: {estimate}")
    if checked.plan is not None:
        for line in memory_plan.lines(checked.plan):
            click.echo(line)
    for note in contract.notes:
        click.echo(f"note: {note}")


@main.command()
@_config_options
@click.option(
    "--host", metavar="HOST", default="127.0.0.1", show_default=True, help="Address to listen on."
)
@click.option(
    "--http-port",
    metavar="PORT",
    default=8000,
    show_default=True,
    help="Port for HTTP; 0: any free one.",
)
@click.option(
    "--grpc-port",
    metavar="PORT",
    default=8001,
    show_default=True,
    help="Port for gRPC; 0: any free one.",
)
@click.option(
    "--metrics-port",
    metavar="PORT",
    default=8002,
    show_default=True,
    help="Port for metrics, over HTTP; 0: any free one.",
)
@click.option(
    "--no-http",
    "allow_http",
    flag_value=False,
    default=True,
    help="Listen for gRPC alone: known holes of older tritonservers are in HTTP.",
)
@click.option(
    "--allow-known-holes",
    is_flag=True,
    help="Let others than this machine reach a tritonserver that a client can end.",
)
@click.option(
    "--mpi-mode",
    type=click.Choice(["auto", "leader", "orchestrator"]),
    default="auto",
    show_default=True,
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
    "--verify-files",
    is_flag=True,
    help="Hash every file of the repository, and not only what was touched since it was built.",
)
@click.option(
    "--allow-damaged", is_flag=True, help="Serve a repository whose files are not what was built."
)
@click.option(
    "--verbose", is_flag=True, help="Show all that Triton logs, and not its trouble only."
)
def serve(
    config_path: Path,
    overrides: Sequence[str],
    mpi_mode: LaunchMode,
    allow_unknown_engine_facts: bool,
    allow_unverified: bool,
    verify_files: bool,
    allow_damaged: bool,
    verbose: bool,
    **listen: Any,
) -> None:
    """Serve the built pair with Triton until it is stopped.

    A repository whose files are not what was built is refused. So is a pair that `specpipe verify`
    found at fault, or that was changed since it was verified; one that never was verified is
    served.
    """
    from specpipe.build import pipeline
    from specpipe.errors import RepositoryError
    from specpipe.evaluate.verification import record
    from specpipe.machine.provenance import gpus
    from specpipe.triton.server import launcher
    from specpipe.triton.server.log_lines import is_worth_showing

    def announce(server: launcher.Server) -> None:
        models = ", ".join(sorted(path.parent.name for path in repository.folder.glob("*/1")))
        log(f"{config.name}: {models}; started in {time.monotonic() - started:.1f} s")
        click.echo(f"ready: {' '.join(server.urls)} {server.metrics_url}")

    def log_of_triton(line: str) -> None:
        if verbose or is_worth_showing(line, has_gpu=has_gpu):
            log(line)

    config = _load(config_path, overrides)
    repository = pipeline.hold_repository(config, verify=verify_files)
    if verify_files:
        log(f"{_shown(repository.folder)}: {repository.hashed}")
    if repository.refusal is not None:
        if not allow_damaged:
            raise RepositoryError(
                f"{repository.refusal}, or serve it as it is with --allow-damaged"
            )
        log(f"warning: {repository.refusal}; allowed by --allow-damaged")
    for line in pipeline.outdated(config):
        log(f"warning: not what {config.source} says now: {line}")
    if (refusal := record.refusal(config.artifacts_dir)) is not None:
        if not allow_unverified:
            raise RepositoryError(f"{refusal}, or serve it as it is with --allow-unverified")
        log(f"warning: {refusal}; allowed by --allow-unverified")
    has_gpu = bool(gpus())
    log("starting Triton ...")
    started = time.monotonic()
    launcher.serve(
        repository.folder,
        launcher.ServeOptions(**listen),
        report=log,
        mpi_mode=mpi_mode,
        allow_unknown_engine_facts=allow_unknown_engine_facts,
        build_command=shlex.join(
            ["specpipe", "build", "--config", str(config_path)]
            + [word for override in overrides for word in ("--set", override)]
        ),
        log=log_of_triton,
        on_ready=announce,
    )


@main.command()
@click.argument("prompt", required=False)
@click.option(
    "--file",
    "prompt_file",
    type=click.File(encoding="utf-8"),
    help="Read the prompt from a file; `-` is standard input.",
)
@click.option(
    "--url",
    metavar="URL",
    default="http://127.0.0.1:8000",
    show_default=True,
    help="The server: http://HOST:PORT or grpc://HOST:PORT.",
)
@click.option("--chat", is_flag=True, help="Send the prompt as a user's message.")
@click.option("--stream", is_flag=True, help="Print the text as it comes.")
@click.option(
    "--max-tokens",
    metavar="N",
    type=int,
    default=128,
    show_default=True,
    help="Tokens of the answer at most.",
)
@click.option(
    "--num-draft-tokens",
    metavar="K",
    type=int,
    help="Draft tokens of every step; 0: the target alone; left out: as many as pay.",
)
@click.option("--temperature", type=float, help="0: greedy, as without it.")
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
@_json_option
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
        asked = None if chat else text
        start = time.perf_counter()
        if stream:
            completions = client.stream(asked, **settings)
        else:
            completions = iter([client.generate(asked, **settings)])
        has_open_line = False
        try:
            for completion in completions:
                if as_json:
                    _print_json(_completion_json(completion), indent=None)
                else:
                    click.echo(completion.text, nl=False)
                    has_open_line = True
        finally:
            if has_open_line:
                click.echo()  # whether the text is whole or broke off
    if not as_json:
        click.echo(_summary(completion, time.perf_counter() - start), err=True)


@main.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Compare the digest of every file, and not its time.")
@_json_option
def inspect(engine: Path, verify: bool, as_json: bool) -> None:
    """Say what a built engine is, and whether it is whole.

    ENGINE is its folder, that of a role (engines/NAME/target) or that of a pair (engines/NAME).
    """
    from specpipe.build import inspection

    found = inspection.inspect(engine, verify=verify)
    if as_json:
        _print_json({"engines": [one.as_json() for one in found]})
    else:
        click.echo("\n\n".join(map(inspection.as_text, found)))
    for one in found:
        if one.damage:
            raise inspection.damaged(one.engine, one.damage)


@main.command()
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
    show_default=True,
    help="Where the image has NVIDIA's templates, scripts and examples.",
)
@_json_option
def doctor(compares_image: bool, app_dir: Path, as_json: bool) -> None:
    """Say what this machine has for building and serving."""
    if not compares_image:
        from specpipe.build.doctor import examine

        lines = examine()
        if as_json:
            _print_json({line.subject: line.found for line in lines})
        else:
            width = max(len(line.subject) for line in lines) + 2
            for line in lines:
                click.echo(f"{line.subject:{width}}{line.found}")
        return
    from specpipe.runtimes.tensorrt_llm.doctor import compare_image

    release, comparisons = compare_image(app_dir)
    if as_json:
        found = [dataclasses.asdict(comparison) for comparison in comparisons]
        _print_json({"release": release.version, "comparisons": found})
    else:
        for comparison in comparisons:
            verdict = "differs" if comparison.differences else "as known"
            click.echo(f"{comparison.subject} ({comparison.examined}): {verdict}")
            for difference in comparison.differences:
                click.echo(f"  {difference}")
    differing = [comparison.subject for comparison in comparisons if comparison.differences]
    if differing:
        raise click.ClickException(
            f"this is not what specpipe knows of TensorRT-LLM {release.version}: "
            f"{', '.join(differing)}"
        )


@main.command()
@click.option(
    "--config",
    "config_path",
    required=True,
    type=click.Path(path_type=Path),
    help="A YAML for runtime tensorrt_llm with backend tensorrt.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write; left out: the YAML's name with -pytorch.",
)
def migrate(config_path: Path, output: Path | None) -> None:
    """Turn a config for TensorRT-LLM's engines into one for its backend pytorch.

    Prints what changes in settings and in behaviour.
    """
    from specpipe.build.migrate import migrate

    migration = migrate(config_path, output)
    click.echo(_shown(migration.output))
    for title, lines in (("settings", migration.settings), ("behaviour", migration.behaviour)):
        click.echo(f"{title}:")
        for line in lines:
            click.echo(f"  {line}")


@main.command()
def schema() -> None:
    """Print the JSON Schema of the YAML, for editors."""
    from specpipe.config.sections import json_schema

    _print_json(json_schema())


for _command in (quickstart, verify, bench, tune, report, nightly):
    main.add_command(_command)


def _load(path: Path, overrides: Sequence[str]) -> PipelineConfig:
    from specpipe.build.load import load_config

    return load_config(path, overrides)


def _prompt(prompt: str | None, file: Any) -> str:
    if prompt is not None and file is not None:
        raise click.UsageError("Give the prompt once: as PROMPT or with --file.")
    if prompt is not None:
        return prompt
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise click.UsageError("Missing prompt: give PROMPT or --file, or pipe it in.")
    source = sys.stdin if file is None else file
    try:
        return str(source.read())
    except UnicodeDecodeError as exc:
        raise ConfigError(
            f"the prompt in {source.name} is not text in UTF-8 (byte {exc.start})"
        ) from exc


def _stage_json(report: StageReport) -> dict[str, Any]:
    return {
        "stage": report.stage,
        "artifact": str(report.artifact),
        "reasons": list(report.reasons),
        **({"commands": [list(command) for command in report.commands]} if report.commands else {}),
    }


def _completion_json(completion: Completion) -> dict[str, Any]:
    values = dataclasses.asdict(completion)
    return {key: value for key, value in values.items() if value not in (None, ())}


def _summary(completion: Completion, seconds: float) -> str:
    """Writes what the last response reports in one line; seconds is what the answer took."""
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


def _shown(path: Path) -> str:
    """Returns a path as it is seen from here, where it lies below."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _print_json(data: Any, indent: int | None = 2) -> None:
    click.echo(json.dumps(data, indent=indent, ensure_ascii=False))
