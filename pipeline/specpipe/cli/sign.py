"""`specpipe sign`: the signature over a version's folder, where `publish` does not have the key."""

from __future__ import annotations

from pathlib import Path

import click

from specpipe.cli.options import key_option
from specpipe.cli.output import shown


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@key_option
def sign(folder: Path, key_path: Path | None) -> None:
    """Sign the folder of a version.

    FOLDER is engines/NAME/versions/N; model.sig in it covers every other file. `publish` signs by
    itself where it has the key: this is for a key that is kept on another machine, and for signing
    again with a new one.
    """
    from specpipe.release.trust import keys, verification

    if key_path is None:
        raise click.UsageError("Missing option '--key' (or SPECPIPE_SIGNING_KEY).")
    click.echo(shown(verification.sign(folder, key_path, keys.passphrase())))
