"""What was promoted here is read back as it was written, or refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from specpipe.errors import StoreError
from specpipe.stores.promoted import read_promotion, write_promotion
from specpipe.stores.store import Promotion


def test_what_was_promoted_here_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "promoted.json"
    assert read_promotion(path) is None
    promotion = Promotion(
        number=7, digest="ab" * 32, promoted_at="2026-11-29T00:00:00+00:00", previous=6
    )
    write_promotion(path, promotion)
    assert read_promotion(path) == promotion
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ('{"number": "seven"}', "number: Input should be a valid integer"),
        ("[1]", "it holds no JSON object"),
    ],
)
def test_a_damaged_file_is_refused_with_what_to_do(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "promoted.json"
    path.write_text(text)
    with pytest.raises(StoreError) as caught:
        read_promotion(path)
    message = str(caught.value)
    assert message.startswith(f"{path} is not what `specpipe promote` writes ({why}")
    assert message.endswith(": remove it, and promote a version again")
