"""What programs may import: `specpipe.__all__`, and what stands of it in docs/python-api.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import specpipe
from specpipe import errors
from specpipe.speculative.request import Statistics
from specpipe.triton.client import client

ROOT = Path(__file__).parents[1]


def test_the_documents_list_every_public_name() -> None:
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(\w+)` \| \S", page, re.MULTILINE)
    assert sorted(documented) == specpipe.__all__


def test_names_are_those_of_their_modules() -> None:
    names: dict[str, Any] = {}
    exec("from specpipe import *", names)
    lazy = {"Client": client.Client, "Completion": client.Completion, "Statistics": Statistics}
    kinds = (errors.SpecpipeError, errors.ServerError)
    subclasses = [cls for kind in kinds for cls in kind.__subclasses__()]
    failures = {cls.__name__: cls for cls in subclasses if cls.__module__ == errors.__name__}
    expected = {**lazy, **failures, "SpecpipeError": errors.SpecpipeError}
    del names["__builtins__"]
    assert names == {**expected, "__version__": specpipe.__version__}


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="^module 'specpipe' has no attribute 'Clint'$"):
        specpipe.Clint  # type: ignore[attr-defined]  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, specpipe; print(*sorted(n for n in sys.modules if n.startswith('specpipe')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["specpipe", "specpipe.errors", "specpipe.version"]
