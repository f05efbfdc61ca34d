"""Holds the tables of engines against their originals in NVIDIA's image."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from specpipe.runtimes.tensorrt_llm.engines import build_flags, contract
from specpipe.runtimes.tensorrt_llm.engines.build_flags import Flag
from specpipe.runtimes.tensorrt_llm.engines.contract import BackendTensor

TEMPLATE = "all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt"

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


def _tensor_differences(
    kind: str, declared: Any, expected: tuple[BackendTensor, ...]
) -> Iterator[str]:
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


def _describe_expected(tensor: BackendTensor) -> Mapping[str, object]:
    return {
        "type": tensor.dtype,
        "dims": list(tensor.dims),
        "optional": tensor.optional,
        "ragged": tensor.is_ragged,
        "scalar": tensor.is_scalar,
    }


def missing(text: str, words: Iterable[str]) -> Iterator[str]:
    """Looks for whole words; one that ends with `=` goes on with its value."""
    for word in words:
        end = "" if word.endswith("=") else r"(?![\w-])"
        if not re.search(rf"(?<![\w-]){re.escape(word)}{end}", text):
            yield f"it has no {word}"


def backend_differences(folder: Path) -> Iterator[str]:
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
