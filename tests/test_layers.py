"""The plan of the package: which floor may use which, and what is imported by name at run time."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pipeline" / "specpipe"


def check_layers(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs import-linter on the package in a folder, with the contracts of this checkout."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache", str(ROOT / "pyproject.toml")],
        cwd=folder,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("config/sections.py", "from specpipe.runtimes.setting_faults import setting_faults"),
        (
            "runtimes/plan.py",
            "if TYPE_CHECKING:\n    from specpipe.build.stages.convert import Convert",
        ),
        (
            "runtimes/pair/costs.py",
            "def engine_pair():\n    from specpipe.runtimes.pair import engine_pair",
        ),
    ],
    ids=["at the top", "for types", "in a function"],
)
def test_an_import_that_points_up_or_round_breaks_the_contract(
    tmp_path: Path, module: str, line: str
) -> None:
    pytest.importorskip("importlinter")
    shutil.copytree(PACKAGE, tmp_path / "specpipe", ignore=shutil.ignore_patterns("shipped"))
    path = tmp_path / "specpipe" / module
    path.write_text(f"{path.read_text()}\n{line}\n")
    checked = check_layers(tmp_path)
    assert checked.returncode == 1, checked.stdout + checked.stderr
    assert "BROKEN" in checked.stdout


def test_what_is_imported_by_name() -> None:
    """The linter cannot see these: runtimes by registry, and libraries that may be missing."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if "shipped" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                ("import_module", "__import__")
            ):
                name = str(path.relative_to(PACKAGE))
                found.setdefault(name, []).append(ast.unparse(node.args[0]))
    assert found == {
        "runtimes/runtime.py": ["module_name"],
        "runtimes/tensorrt/cuda.py": ["'cuda.bindings.runtime'"],
        "runtimes/tensorrt/library.py": ["library"],
        "runtimes/tensorrt_llm/llmapi/backend.py": ["'tensorrt_llm'", "'tensorrt_llm.llmapi'"],
    }
