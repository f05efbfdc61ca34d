"""`specpipe keys`: key pairs that sign versions, and the file of those that are trusted."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from specpipe.cli.options import json_option
from specpipe.cli.output import Group, print_result, shown

_trust_option = click.option(
    "--trust",
    "trust_path",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file of trusted publishers, which release.trust names.",
)


@click.group(cls=Group)
def keys() -> None:
    """Make keys that sign versions, and say whose are trusted."""


@keys.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
def new(path: Path) -> None:
    """Make a key pair: the private key at PATH, the public one at PATH.pub.

    The private key is kept under the passphrase in SPECPIPE_SIGNING_PASSPHRASE, and for its owner
    alone. What is there is not replaced.
    """
    from specpipe.release.trust import keys as trust_keys

    fingerprint = trust_keys.make_key_pair(path, trust_keys.passphrase())
    click.echo(f"{shown(path)}, {shown(path)}.pub: key {fingerprint}")


@keys.command()
@click.argument("public_key", type=click.Path(path_type=Path, dir_okay=False))
@_trust_option
@click.option("--name", required=True, help="Whose key it is; one publisher may have several.")
@click.option(
    "--pairs",
    multiple=True,
    metavar="PATTERN",
    help="Pairs that a new publisher may publish, as in 'python-*'; may be given several times. "
    "Left out: all.",
)
@click.option(
    "--expires",
    type=click.DateTime(["%Y-%m-%d"]),
    metavar="YYYY-MM-DD",
    help="Day, in UTC, from which on what the key signs is refused.",
)
def trust(
    public_key: Path,
    trust_path: Path,
    name: str,
    pairs: tuple[str, ...],
    expires: datetime | None,
) -> None:
    """Add a publisher's public key to the file of trusted ones, made where there is none.

    PUBLIC_KEY is what `specpipe keys new PATH` wrote to PATH.pub.
    """
    from specpipe.release.trust.keys import fingerprint, read_public_key
    from specpipe.release.trust.publishers import read_or_new

    public = read_public_key(public_key)
    until = None if expires is None else expires.replace(tzinfo=timezone.utc)
    read_or_new(trust_path).with_key(public, name=name, pairs=pairs, expires=until).write()
    click.echo(f"{shown(trust_path)}: {name} may sign with key {fingerprint(public)}")


@keys.command()
@click.argument("fingerprint")
@_trust_option
@click.option("--reason", required=True, help="Why; whoever is refused reads it.")
@click.option(
    "--keep",
    "kept",
    multiple=True,
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False),
    help="A version that is known to be from before, and stays good; may be given several times.",
)
def revoke(fingerprint: str, trust_path: Path, reason: str, kept: tuple[Path, ...]) -> None:
    """Refuse from now on all that a key signed, whenever that was.

    FINGERPRINT is that of the key, or how it begins.
    """
    from specpipe.release.trust.publishers import read_trust
    from specpipe.release.trust.verification import kept_signature

    trusted = read_trust(trust_path)
    publisher, key = trusted.named(fingerprint)
    signatures = [kept_signature(folder, trusted, key) for folder in kept]
    trusted.with_revoked(key.fingerprint, why=reason, still_trusted=signatures).write()
    click.echo(f"{shown(trust_path)}: key {key.fingerprint} of {publisher.name} is revoked")


@keys.command("list")
@_trust_option
@json_option
def list_(trust_path: Path, as_json: bool) -> None:
    """Say whose keys are trusted, and which no more."""
    from specpipe.release.trust.publishers import read_trust

    rows: list[dict[str, Any]] = [
        {
            "publisher": publisher.name,
            "pairs": list(publisher.pairs),
            "key": key.fingerprint,
            **key.model_dump(mode="json", exclude={"pem"}),
        }
        for publisher, key in read_trust(trust_path).all_keys()
    ]
    print_result({"keys": rows}, map(_line, rows), as_json=as_json)


def _line(row: dict[str, Any]) -> str:
    state = "" if row["expires"] is None else f", expires {row['expires'][:10]}"
    if (revoked := row["revoked"]) is not None:
        state = f", revoked {revoked['at'][:10]}: {revoked['reason']}"
    return (
        f"{row['key']}  {row['publisher']} ({', '.join(row['pairs'])}), "
        f"added {row['added'][:10]}{state}"
    )
