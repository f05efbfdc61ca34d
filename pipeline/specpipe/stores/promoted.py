"""`engines/NAME/promoted.json`: which version this machine serves, as its last swap left it.

The store says what is served everywhere; this file says what was served here, for a machine that
starts while the store cannot be reached, and to refuse a store that was set back.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pydantic import TypeAdapter

from specpipe.errors import StoreError
from specpipe.machine.own_json import read_object, reason, write_object
from specpipe.machine.whole_file import written_whole
from specpipe.stores.store import Promotion

_PROMOTIONS = TypeAdapter(Promotion)
_MAX_BYTES = 1 << 20


def read_promotion(path: Path) -> Promotion | None:
    """Returns what was promoted here; None where nothing was, StoreError for a damaged file."""
    try:
        return _PROMOTIONS.validate_python(read_object(path, max_bytes=_MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise StoreError(
            f"{path} is not what `specpipe promote` writes ({reason(exc)}): remove it, and promote "
            "a version again"
        ) from exc


def write_promotion(path: Path, promotion: Promotion) -> None:
    """Says what is promoted here; whoever reads finds the old one or the new one."""
    with written_whole(path) as staged:
        write_object(staged, dataclasses.asdict(promotion))
