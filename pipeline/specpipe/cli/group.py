"""The command `specpipe`: parses, calls and prints.

Results go to stdout, progress and errors to stderr. Exit codes: 0, 1 (refused or failed, with one
sentence that says what to do), 2 (usage), 130 (Ctrl-C), 143 (SIGTERM; see signals.py). A traceback
is for `--debug` alone. What a command needs is imported when it runs, so that `--help` is quick and
no command needs another one's libraries.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import traceback
from typing import Any

import click

from specpipe import __version__, failures
from specpipe.cli.bench import bench
from specpipe.cli.build import build
from specpipe.cli.check import check
from specpipe.cli.diff import diff
from specpipe.cli.doctor import doctor
from specpipe.cli.draft import draft
from specpipe.cli.gateway import gateway
from specpipe.cli.generate import generate
from specpipe.cli.init import init
from specpipe.cli.inspect import inspect
from specpipe.cli.keys import keys
from specpipe.cli.lock import lock
from specpipe.cli.migrate import migrate
from specpipe.cli.nightly import nightly
from specpipe.cli.output import Group
from specpipe.cli.progress import StderrDisplay
from specpipe.cli.promote import promote, rollback
from specpipe.cli.publish import publish
from specpipe.cli.quickstart import quickstart
from specpipe.cli.report import report
from specpipe.cli.schema import schema
from specpipe.cli.serve import serve
from specpipe.cli.sign import sign
from specpipe.cli.tune import tune
from specpipe.cli.verify import verify
from specpipe.cli.verify_signature import verify_signature
from specpipe.cli.versions import versions
from specpipe.errors import to_sentence
from specpipe.progress import shown


class _Group(Group):
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


@click.group(
    cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(__version__, prog_name="specpipe")
@click.option("--debug", is_flag=True, help="Show the traceback of a failure.")
def main(debug: bool) -> None:
    """Two checkpoints in, a draft–target pair served by Triton out."""
    click.get_current_context().with_resource(shown(StderrDisplay()))


for _command in (
    bench,
    build,
    check,
    diff,
    doctor,
    draft,
    gateway,
    generate,
    init,
    inspect,
    keys,
    lock,
    migrate,
    nightly,
    promote,
    publish,
    quickstart,
    report,
    rollback,
    schema,
    serve,
    sign,
    tune,
    verify,
    verify_signature,
    versions,
):
    main.add_command(_command)
