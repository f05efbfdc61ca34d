"""Holds what specpipe knows of TensorRT-LLM against an image that has it, and says what differs.

The tables (config/tensorrt_llm_versions.py, build_flags.py, contract.py, model_yaml.py) were read
from sources whose release is not always certain. In NVIDIA's image the originals lie beside them:
the help of `trtllm-build`, the templates and scripts under /app, the backend's library, the Python
package.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from specpipe.config.tensorrt_llm_versions import DEFAULT_VERSION, RELEASES, Release
from specpipe.errors import RuntimeUnavailable
from specpipe.runtimes.engine_fit import installed
from specpipe.runtimes.tensorrt_llm.engines import build_flags, contract
from specpipe.runtimes.tensorrt_llm.engines.build_flags import Flag
from specpipe.runtimes.tensorrt_llm.engines.contract import Tensor
from specpipe.runtimes.tensorrt_llm.engines.toolbox import BUILDER
from specpipe.runtimes.tensorrt_llm.llmapi.model_yaml import SPELLINGS, release_line

BACKEND_DIR = Path("/opt/tritonserver/backends/tensorrtllm")

TEMPLATE = "all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt"
LAUNCH_SCRIPT = "scripts/launch_triton_server.py"

LAUNCH_WORDS = (
    "mpirun",
    "--allow-run-as-root",
    "--model-repository=",
    "--disable-auto-complete-config",
    "--backend-config=python,shm-region-prefix-name=",
    "--model-control-mode=explicit",
    "--load-model=",
    "--pinned-memory-pool-byte-size=0",
    "--enable-peer-access=false",
    "--cuda-memory-pool-byte-size=",
    "TRTLLM_ORCHESTRATOR",
    "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES",
)
"""What NVIDIA's launch script puts on the command line and into the environment, as serve.py and
triton/server/command.py do."""

DECOUPLED_REFUSAL = b"Streaming is only supported if model is deployed using decoupled mode"
"""What the backend says to a stream of a model that is not decoupled. There is no such sentence for
draft tokens: so `target` is decoupled, and a request without draft tokens streams in one call."""

_TEXTS = re.compile(rb"[\x20-\x7e]{16,}")
_REFUSES_DRAFTS = re.compile(rb"(?=.* )(?=.*draft)(?=.*(decoupled|streaming))", re.IGNORECASE)


@dataclass(frozen=True)
class Comparison:
    """One table against its original; no differences: they agree.

    subject   what was compared
    examined  where the original is
    """

    subject: str
    examined: str
    differences: tuple[str, ...]


def compare_image(app_dir: Path) -> tuple[Release, tuple[Comparison, ...]]:
    """Compares everything with the installed release, or the default one where none is.

    Raises RuntimeUnavailable where there is nothing to compare with.
    """
    version = installed("tensorrt_llm")
    release = RELEASES.get(version or DEFAULT_VERSION, RELEASES[DEFAULT_VERSION])
    if version is None and not app_dir.is_dir():
        raise RuntimeUnavailable(
            f"TensorRT-LLM is not installed here, and there is no {app_dir}: run this inside "
            f"NVIDIA's image, {release.image}"
        )
    package = _package_dir()
    compared: tuple[tuple[str, str, Callable[[], Iterable[str]]], ...] = (
        ("versions", "installed packages", lambda: _versions(version, release)),
        ("flags", f"{BUILDER} --help", lambda: flag_differences(_help(), release.version)),
        (
            "template of an engine's model",
            str(app_dir / TEMPLATE),
            lambda: template_differences(_read(app_dir / TEMPLATE), release.version),
        ),
        (
            "launch script",
            str(app_dir / LAUNCH_SCRIPT),
            lambda: _missing(_read(app_dir / LAUNCH_SCRIPT), LAUNCH_WORDS),
        ),
        ("backend", str(BACKEND_DIR), lambda: _backend(BACKEND_DIR)),
        (
            "LLM API",
            str(package / "llmapi/llm_args.py"),
            lambda: llm_api_differences(_read(package / "llmapi/llm_args.py"), release.version),
        ),
    )
    return release, tuple(
        Comparison(subject, examined, tuple(_caught(differences)))
        for subject, examined, differences in compared
    )


class _Unreadable(Exception):
    """An original that is not there, or is something else; the sentence says why."""


def _caught(differences: Callable[[], Iterable[str]]) -> Iterator[str]:
    try:
        yield from differences()
    except _Unreadable as exc:
        yield str(exc)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as exc:
        raise _Unreadable(f"it cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise _Unreadable(f"it cannot be read: {exc}") from exc


def _help() -> str:
    try:
        printed = subprocess.run(
            [BUILDER, "--help"],
            env={**os.environ, "COLUMNS": "200"},  # argparse breaks lines to this width
            capture_output=True,
            text=True,
            timeout=300,  # importing TensorRT-LLM takes a minute on a cold disk
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise _Unreadable(f"it does not run: {exc}") from exc
    return printed.stdout


def _package_dir() -> Path:
    spec = importlib.util.find_spec("tensorrt_llm")
    if spec is None or not spec.submodule_search_locations:
        return Path("tensorrt_llm")
    return Path(spec.submodule_search_locations[0])


def _versions(version: str | None, release: Release) -> Iterator[str]:
    if version is None:
        yield (
            f"TensorRT-LLM is not installed here; all is compared with the tables of "
            f"{release.version}"
        )
        return
    if version not in RELEASES:
        known = ", ".join(RELEASES)
        yield f"TensorRT-LLM {version} is not in the table, which has {known}"
    found = {
        "TensorRT": (installed("tensorrt"), release.tensorrt),
        "CUDA": (os.environ.get("CUDA_VERSION"), release.cuda),
    }
    for name, (here, expected) in found.items():
        if here != expected:
            yield f"{name} is {here or 'unknown'}, the table has {expected}"


@dataclass(frozen=True)
class HelpFlag:
    """What a help text says of one flag; None: it does not say."""

    names: frozenset[str]
    choices: tuple[str, ...] | None
    default: str | None


def parse_help(text: str) -> dict[str, HelpFlag]:
    """Reads the options of argparse's help, by each of their names without the dashes."""
    found: dict[str, HelpFlag] = {}
    for entry in re.split(r"\n(?=  -)", text)[1:]:
        # The invocation ends at two spaces, or with the line.
        invocation = re.match(r"  (-.*?)(?:  |\n|$)", entry)
        if invocation is None:
            continue
        names = frozenset(re.findall(r"--([\w-]+)", invocation[1]))
        choices = re.search(r"\{([^}]*)\}", invocation[1])
        default = re.search(r"\(default:\s+(.*?)\)", re.sub(r"\s+", " ", entry))
        flag = HelpFlag(
            names,
            tuple(choices[1].split(",")) if choices else None,
            default[1] if default else None,
        )
        found |= dict.fromkeys(names, flag)
    return found


def flag_differences(help_text: str, version: str) -> Iterator[str]:
    """Compares the flags of `trtllm-build --help` with the table's."""
    there = parse_help(help_text)
    here = {
        name: flag for flag in build_flags.flags(version) for name in (flag.name, *flag.aliases)
    }
    for name in sorted(there.keys() - here.keys() - {"help"}):
        yield f"--{name} is not in the table"
    for name, flag in here.items():
        if name not in there:
            yield f"--{name} is in the table, but not here"
        elif name == flag.name:
            yield from _flag_differences(flag, there[name])


def _flag_differences(flag: Flag, there: HelpFlag) -> Iterator[str]:
    choices = {"toggle": ("enable", "disable"), "choice": flag.choices}.get(flag.kind)
    if choices is not None and there.choices is not None and set(choices) != set(there.choices):
        yield (
            f"{flag.option} takes {', '.join(sorted(there.choices))}; the table has "
            f"{', '.join(sorted(choices))}"
        )
    default = flag.default
    if default is None or there.default in (None, "None"):
        return  # decided by other values, which a help text does not tell
    expected = str(default)
    if flag.kind == "toggle":
        expected = "enable" if default else "disable"
    if there.default != expected:
        yield f"{flag.option} is {there.default} by default; the table has {expected}"


def parse_template(text: str) -> pb.ModelConfig:
    """Parses a `config.pbtxt` with placeholders; raises ParseError.

    In text they stay. A data type becomes TYPE_INVALID, anything else the smallest true value.
    """
    text = re.sub(r"(data_type\s*:\s*)\$\{\w+\}", r"\1TYPE_INVALID", text)
    text = re.sub(r"(decoupled\s*:\s*)\$\{\w+\}", r"\1true", text)
    text = re.sub(r'("[^"\n]*")|\$\{\w+\}', lambda found: found[1] or "1", text)
    return text_format.Parse(text, pb.ModelConfig())


def template_differences(text: str, version: str) -> Iterator[str]:
    """Compares the template of an engine's model with the contract."""
    try:
        config = parse_template(text)
    except text_format.ParseError as exc:
        yield f"it cannot be parsed: {exc}"
        return
    yield from _tensor_differences("input", config.input, contract.inputs(version))
    yield from _tensor_differences("output", config.output, contract.outputs(version))
    there = {key: value.string_value for key, value in config.parameters.items()}
    here = {
        parameter.key: parameter
        for parameter in contract.PARAMETERS
        if parameter.placeholder is not None or parameter.use == "fixed"
    }
    for key in sorted(there.keys() - {parameter.key for parameter in contract.PARAMETERS}):
        yield f"parameter {key} is not in the contract"
    for key, parameter in here.items():
        placeholder = parameter.placeholder
        expected = f"${{{placeholder}}}" if placeholder else parameter.value
        if key not in there:
            yield f"parameter {key} is in the contract, but not here"
        elif there[key] != expected:
            yield f"parameter {key} is '{there[key]}'; the contract has '{expected}'"


def _tensor_differences(kind: str, declared: Any, expected: tuple[Tensor, ...]) -> Iterator[str]:
    there = {tensor.name: tensor for tensor in declared}
    here = {tensor.name: tensor for tensor in expected}
    for name in sorted(there.keys() - here.keys()):
        yield f"{kind} {name} is not in the contract"
    for name, tensor in here.items():
        if name not in there:
            yield f"{kind} {name} is in the contract, but not here"
            continue
        found, wanted = _describe(there[name]), _describe_expected(tensor)
        for field, value in found.items():
            if value != wanted[field] and "INVALID" not in str(value):
                yield f"{kind} {name}: {field} is {value}; the contract has {wanted[field]}"


def _describe(declared: Any) -> dict[str, object]:
    described: dict[str, object] = {
        "type": pb.DataType.Name(declared.data_type).removeprefix("TYPE_"),
        "dims": list(declared.dims),
    }
    if isinstance(declared, pb.ModelInput):
        described |= {
            "optional": declared.optional,
            "ragged": declared.allow_ragged_batch,
            "scalar": declared.HasField("reshape"),
        }
    return described


def _describe_expected(tensor: Tensor) -> Mapping[str, object]:
    return {
        "type": tensor.dtype,
        "dims": list(tensor.dims),
        "optional": tensor.optional,
        "ragged": tensor.is_ragged,
        "scalar": tensor.is_scalar,
    }


def _missing(text: str, words: Iterable[str]) -> Iterator[str]:
    """Looks for whole words; one that ends with `=` goes on with its value."""
    for word in words:
        end = "" if word.endswith("=") else r"(?![\w-])"
        if not re.search(rf"(?<![\w-]){re.escape(word)}{end}", text):
            yield f"it has no {word}"


def _backend(folder: Path) -> Iterator[str]:
    """The worker is where the contract has it, and the library refuses what it is known to."""
    worker = next(p.value for p in contract.PARAMETERS if p.key == "executor_worker_path")
    if not (folder / Path(worker).name).is_file():
        yield f"{folder / Path(worker).name} is missing"
    libraries = sorted(folder.glob("libtriton_tensorrtllm*.so"))
    texts = [text for path in libraries for text in _TEXTS.findall(path.read_bytes())]
    if not libraries:
        yield f"{folder} has no libtriton_tensorrtllm.so"
    elif not any(DECOUPLED_REFUSAL in text for text in texts):
        yield f"no library says '{DECOUPLED_REFUSAL.decode()}'"
    for text in sorted(set(texts)):
        if _REFUSES_DRAFTS.search(text):
            yield f"a library may refuse draft tokens of a decoupled model: '{text.decode()}'"


def llm_api_differences(source: str, version: str) -> Iterator[str]:
    """Looks for the spelling of `speculative_config` in llm_args.py, without importing it."""
    spelling = SPELLINGS.get(release_line(version))
    if spelling is None:
        yield f"specpipe writes no model.yaml for {version}"
        return
    name = "DraftTargetDecodingConfig"
    tree = ast.parse(source)
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    if spelling.decoding_type not in texts:
        yield f"it has no decoding type '{spelling.decoding_type}'"
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    if name not in classes:
        yield f"it has no class {name}"
        return
    fields = set(_field_names(classes, name))
    for field in ("max_draft_len", spelling.draft_model):
        if field not in fields:
            yield f"{name} has no field {field}"


def _field_names(classes: Mapping[str, ast.ClassDef], name: str) -> Iterator[str]:
    """The fields of a class and of its bases in the same file."""
    for statement in classes[name].body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _field_names(classes, base.id)
