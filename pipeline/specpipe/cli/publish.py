"""`specpipe publish`: a proved pair becomes the next version in a store."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from specpipe.cli.options import (
    built_pair_options,
    json_option,
    key_option,
    load,
    open_store_of,
    store_option,
)
from specpipe.cli.output import print_result
from specpipe.cli.progress import log


@click.command()
@built_pair_options
@store_option
@key_option
@click.option(
    "--allow-unproved",
    is_flag=True,
    help="Publish a pair that no nightly run, nor verification, has looked at.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be published; publish nothing.")
@json_option
def publish(
    config_path: Path,
    overrides: Sequence[str],
    store_url: str | None,
    key_path: Path | None,
    allow_unproved: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Publish the built pair as the next version.

    Its last nightly run must be good and of this very build; a pair that never had one must be
    verified. What the store holds already is not moved again; the same content published again is
    the version that it already is. With a key the version is signed.
    """
    from specpipe.release import publishing
    from specpipe.release.trust import keys, verification

    config = load(config_path, overrides)
    sign = None
    if key_path is not None:
        phrase = keys.passphrase()
        keys.load_private_key(key_path, phrase)  # before anything is hashed
        sign = partial(verification.sign, key=key_path, passphrase=phrase)
    published = publishing.publish(
        config,
        open_store_of(config, store_url),
        sign,
        allow_unproved=allow_unproved,
        dry_run=dry_run,
        log=log,
    )
    print_result(published.to_json(), published.lines(), as_json=as_json)
