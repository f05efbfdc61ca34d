"""`specpipe verify-signature`: who signed a version, and whether it is still that."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from specpipe.cli.options import json_option, load
from specpipe.cli.output import print_result, shown


@click.command("verify-signature")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--trust",
    "trust_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file of trusted publishers.",
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The YAML of the pair, whose release.trust it is; a version of another pair is refused.",
)
@json_option
def verify_signature(
    folder: Path, trust_path: Path | None, config_path: Path | None, as_json: bool
) -> None:
    """Say who signed a version, or why that does not count.

    FOLDER is engines/NAME/versions/N. Every file is read; one that was changed, added or removed is
    named.
    """
    from specpipe.errors import SignatureError
    from specpipe.release.trust import publishers, serving, verification

    if (trust_path is None) == (config_path is None):
        raise click.UsageError("Give either --trust or --config: whose signature is to count.")
    pair = None
    if trust_path is not None:
        trust = publishers.read_trust(trust_path)
    else:
        assert config_path is not None
        config = load(config_path, ())
        pair = config.name
        found = serving.trust_of(config)
        if found is None:
            raise SignatureError(
                f"{config.source} trusts nobody: set release.trust to a file of publishers, or "
                "give --trust FILE"
            )
        trust = found
    verified = verification.verify(folder, trust, expected_pair=pair)
    print_result(asdict(verified), [f"{shown(folder)}: {verified}"], as_json=as_json)
