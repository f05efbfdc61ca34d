"""How specpipe is installed: what comes along, and whether hints add to what is there."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from specpipe import __version__
from specpipe.runtimes.tensorrt.library import EXTRAS
from tests.installed import FROM_HERE, ROOT, Environment, build, extras_of, run

PACKAGE = ROOT / "pipeline" / "specpipe"


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def test_a_wheel_file_is_taken_again(environment: Environment, wheel: Path, empty: Path) -> None:
    environment.install(wheel)
    hint = environment.ask("with_extras('torch', 'triton')", cwd=empty)
    assert hint == f"{environment.python} -m pip install '{wheel}[torch,triton]'"
    run(["sh", "-c", f"{hint} {shlex.join(FROM_HERE)}"], cwd=empty)
    assert environment.ask("with_extras('torch', 'triton')", cwd=empty) == hint


def test_a_wheel_from_an_index_is_asked_for_by_name(
    environment: Environment, wheel: Path, empty: Path
) -> None:
    environment.install("--find-links", wheel.parent, "specpipe-llm")
    by_path = {"PATH": f"{environment.bin}:/usr/bin:/bin"}
    (environment.bin / "pip").touch(0o755)
    assert environment.ask("with_extras('evaluate')", cwd=empty, **by_path) == (
        "pip install 'specpipe-llm[evaluate]'"
    )
    assert environment.ask("with_library('pyarrow')", cwd=empty, **by_path) == "pip install pyarrow"
    (recorded,) = environment.site_packages.glob("specpipe_llm-*.dist-info/INSTALLER")
    recorded.write_text("uv\n")
    assert environment.ask("with_extras('evaluate')", cwd=empty) == (
        f"uv pip install --python {environment.python} 'specpipe-llm[evaluate]'"
    )
    is_active = {"VIRTUAL_ENV": str(environment.bin.parent)}
    assert environment.ask("with_extras('evaluate')", cwd=empty, **is_active) == (
        "uv pip install 'specpipe-llm[evaluate]'"
    )


def test_a_target_folder_is_added_to(
    environment: Environment, wheel: Path, empty: Path, tmp_path: Path
) -> None:
    environment.install("--target", tmp_path / "its own", wheel)
    assert environment.ask(
        "with_extras('evaluate')", cwd=empty, PYTHONPATH=str(tmp_path / "its own")
    ) == (f"{environment.python} -m pip install --target '{tmp_path}/its own' '{wheel}[evaluate]'")


def test_an_editable_install_stays_one(
    environment: Environment, checkout: Path, empty: Path
) -> None:
    environment.install("--editable", checkout)
    hint = environment.ask("with_extras('evaluate')", cwd=empty)
    assert hint == f"{environment.python} -m pip install -e '{checkout}[evaluate]'"
    run(["sh", "-c", f"{hint} {shlex.join(FROM_HERE)}"], cwd=empty)
    assert environment.ask("describe()", cwd=empty) == (
        f"specpipe-llm {__version__}, editable, in {checkout}"
    )


def test_sources_that_are_not_installed(
    environment: Environment, checkout: Path, empty: Path
) -> None:
    sources = {"PYTHONPATH": str(checkout / "pipeline")}
    assert environment.ask("with_extras('evaluate')", cwd=empty, **sources) == (
        f"{environment.python} -m pip install -e '{checkout}[evaluate]'"
    )
    assert environment.ask("describe()", cwd=empty, **sources) == (
        f"the sources in {checkout}, not installed"
    )


# With `--target` in tests/triton/test_quickstart_command.py.
@pytest.mark.parametrize("kind", ["editable", "sdist", "wheel"])
def test_the_pair_that_comes_along_is_built_in_an_empty_folder(
    environment: Environment, checkout: Path, wheel: Path, empty: Path, tmp_path: Path, kind: str
) -> None:
    pytest.importorskip("torch")
    if kind == "editable":
        environment.install("--editable", checkout)
    elif kind == "sdist":
        environment.install(build("build_sdist", checkout, tmp_path / "sdist"))
    else:
        environment.install(wheel)
    code = (
        "from pathlib import Path; from specpipe import cli; "
        "from specpipe.build import quickstart; "
        "assert quickstart.write_files(Path()) == []; cli.main()"
    )
    command = [environment.python, "-c", code, "build", "--config", "configs/quickstart.yaml"]
    assert run(command, cwd=empty) == "engines/python-code/model_repo\n"
    for model in ("preprocessing", "speculative", "postprocessing"):
        path = Path("model_repo", model, "1", "model.py")
        assert (empty / "engines/python-code" / path).read_bytes() == (ROOT / path).read_bytes()


def test_a_stranger_of_the_earlier_name_is_found(
    environment: Environment, wheel: Path, empty: Path
) -> None:
    environment.install(wheel)
    here = f"[c for c in conflicts() if {str(environment.site_packages)!r} in c]"
    assert environment.ask(here, cwd=empty) == "[]"
    stranger = environment.site_packages / "specpipe-0.3.dist-info"
    stranger.mkdir()
    (stranger / "METADATA").write_text("Metadata-Version: 2.1\nName: specpipe\nVersion: 0.3\n")
    pip = f"{environment.python} -m pip"
    told = (
        f"specpipe 0.3 in {environment.site_packages} is another project, or this one by its "
        "earlier name, and has {} also specpipe-llm's: "
        f"{pip} uninstall specpipe && {pip} install --force-reinstall --no-deps {wheel}"
    )
    assert environment.ask(f"*{here}", cwd=empty) == told.format("the import folder that is")
    (stranger / "RECORD").write_text("specpipe/__init__.py,,\nspecpipe/theirs.py,,\n")
    assert environment.ask(f"*{here}", cwd=empty) == told.format("files that are")
    lines = run([environment.bin / "specpipe", "doctor"], cwd=empty).splitlines()
    told_of = {tuple(line.split(maxsplit=1)) for line in lines}
    assert ("installed", f"specpipe-llm {__version__} in {environment.site_packages}") in told_of
    assert ("conflict", told.format("files that are")) in told_of


def hinted_extras() -> Iterator[tuple[str, str]]:
    """Where the code names an extra, and which."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            given = node.args if name == "with_extras" else []
            if name.startswith("require_"):
                given = [keyword.value for keyword in node.keywords if keyword.arg == "extra"]
            for value in given:
                place = f"{path.relative_to(PACKAGE)}:{node.lineno} {ast.unparse(value)}"
                if isinstance(value, ast.Constant):
                    yield place, str(value.value)
                elif isinstance(value, ast.Subscript):  # EXTRAS[library]
                    yield from ((place, extra) for extra in EXTRAS.values())
                else:  # handed on by require_library and require_installed
                    assert place.startswith(("machine/libraries.py", "runtimes/runtime.py")), place
                    assert ast.unparse(value) == "extra"


def test_every_hint_names_an_extra_of_the_wheel(wheel: Path) -> None:
    hinted = list(hinted_extras())
    assert {extra for _, extra in hinted} == {
        "evaluate",
        "gcs",
        "openai",
        "quantize",
        "release",
        "s3",
        "ssh",
        "tensorrt",
        "tensorrt-rtx",
        "torch",
        "train",
        "triton",
    }
    known = extras_of(wheel)
    assert [place for place, extra in hinted if extra not in known] == []


def test_no_message_has_a_command_of_its_own() -> None:
    written = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and re.search(r"pip install (?!--)", str(node.value))
    ]
    assert {place.partition(":")[0] for place in written} <= {"installation.py"}


def test_documents_name_extras_of_the_wheel(wheel: Path) -> None:
    known = extras_of(wheel)
    paths = [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "constraints.txt")),
        *(path for name in ("docs", "models") for path in (ROOT / name).rglob("*.md")),
        *(ROOT / "configs").glob("*.yaml"),
        *(ROOT / "docker").iterdir(),
        *(ROOT / ".github/workflows").iterdir(),
    ]
    named = [
        (path.name, extra)
        for path in paths
        for extras in re.findall(
            r"(?:specpipe(?:-llm)?|['\" ]\.)\[([a-z,-]+)\]|extra `([a-z-]+)`",
            path.read_text(encoding="utf-8"),
        )
        for extra in "".join(extras).split(",")
    ]
    assert {"README.md", "Makefile", "nightly.yml"} <= {name for name, _ in named}
    assert [found for found in named if found[1] not in known] == []
    # And none asks for the stranger on PyPI.
    assert [path.name for path in paths if re.search(r"(?<!/)\bspecpipe\[", path.read_text())] == []
