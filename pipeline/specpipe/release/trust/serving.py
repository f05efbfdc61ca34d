"""What must be signed to be served here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from specpipe.config.sections import PipelineConfig
from specpipe.errors import SignatureError
from specpipe.release.release_file import SIGNATURE_NAME
from specpipe.release.trust.publishers import Trust, read_trust
from specpipe.release.trust.verification import Verified, verify


def trust_of(config: PipelineConfig) -> Trust | None:
    """Returns whom the YAML of a pair trusts; None where it names no file."""
    path = config.release.trust
    return None if path is None else read_trust(config.base_dir / path)


def check_signature(
    config: PipelineConfig,
    repository: Path,
    *,
    allow_unsigned: bool = False,
    log: Callable[[str], None],
) -> Verified | None:
    """Verifies the version that a repository lies in, before it is served.

    A signature that is there, and does not count, is refused whatever was allowed. None comes back
    where there is none, or nobody to trust; `release.require_signature` refuses that, unless
    `allow_unsigned`.
    """
    trust = trust_of(config)
    folder = repository.parent
    is_version = folder.parent == config.artifacts.versions and folder.name.isdecimal()
    if trust is not None and is_version and os.path.lexists(folder / SIGNATURE_NAME):
        verified = verify(
            folder, trust, expected_pair=config.name, expected_number=int(folder.name)
        )
        log(f"{folder}: {verified}")
        return verified
    if config.release.require_signature and not allow_unsigned:
        what = f"{folder} is not signed" if is_version else f"{repository} was built here, unsigned"
        raise SignatureError(
            f"{what}, and release.require_signature is true in {config.source}: `specpipe publish` "
            "with a key and promote that, or serve it as it is with --allow-unsigned"
        )
    if config.release.require_signature:
        log(f"warning: {repository} is not signed; allowed by --allow-unsigned")
    return None
