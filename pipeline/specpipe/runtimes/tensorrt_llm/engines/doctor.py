"""Holds the tables of engines against their originals in NVIDIA's image."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from specpipe.config.tensorrt_llm import BuildFlags
from specpipe.roles import ROLES
from specpipe.runtimes.tensorrt_llm.differences import Difference, refused
from specpipe.runtimes.tensorrt_llm.engines import build_flags, contract
from specpipe.runtimes.tensorrt_llm.engines.build_flags import BuildSpec, Flag
from specpipe.runtimes.tensorrt_llm.engines.contract import BackendTensor, Parameter
from specpipe.runtimes.tensorrt_llm.engines.toolbox import File

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

_SERVE_ELSEWHERE = "build and serve in the image of a release that is known"

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


def flag_differences(help_text: str, version: str) -> Iterator[Difference]:
    """Compares the flags of `trtllm-build --help` with the table's, and with what is written."""
    there = parse_help(help_text)
    here = {
        name: flag for flag in build_flags.flags(version) for name in (flag.name, *flag.aliases)
    }
    written = _written(version)
    for name in sorted(there.keys() - here.keys() - {"help"}):
        yield Difference(f"--{name} is not in the table: its default holds, nothing to do")
    for name, flag in here.items():
        if name in there:
            if name == flag.name:
                yield from _flag_differences(flag, there[name], written.get(name, set()))
        elif name in written:
            yield refused(
                f"--{name} is in the table, but not here, and specpipe writes it: build and serve "
                "in the image of a release that has it"
            )
        else:
            yield Difference(f"--{name} is in the table, but not here: it is not written")


def _written(version: str) -> dict[str, set[str]]:
    """Returns the flags that are written for a plain pair, with their values."""
    found: dict[str, set[str]] = {}
    for role in ROLES:
        spec = BuildSpec(
            role=role,
            version=version,
            max_batch_size=8,
            max_seq_len=1024,
            max_num_tokens=8192,
            num_draft_tokens=4,
            quant_algo=None,
            kv_cache_quant_algo=None,
            gather_logits=True,
            flags=BuildFlags(),
        )
        folder = File(Path(), "any")
        line = build_flags.arguments(spec, checkpoint=folder, out=folder, timing_cache=None)
        for option, value in zip(line, [*line[1:], ""], strict=True):
            if str(option).startswith("--"):
                values = found.setdefault(str(option)[2:], set())
                if not str(value).startswith("--"):
                    values.add(str(value))
    return found


def _flag_differences(flag: Flag, there: HelpFlag, written: set[str]) -> Iterator[Difference]:
    choices = {"toggle": ("enable", "disable"), "choice": flag.choices}.get(flag.kind)
    if choices is not None and there.choices is not None and set(choices) != set(there.choices):
        sentence = (
            f"{flag.option} takes {', '.join(sorted(there.choices))}; the table has "
            f"{', '.join(sorted(choices))}"
        )
        if missing := sorted(written - set(there.choices)):
            yield refused(
                f"{sentence}, and specpipe writes {', '.join(missing)}: set "
                f"engine.tensorrt_llm.build.{flag.name} to one that it takes"
            )
        else:
            yield Difference(f"{sentence}: keep to what it takes")
    default = flag.default
    if default is None or there.default in (None, "None"):
        return  # decided by other values, which a help text does not tell
    expected = str(default)
    if flag.kind == "toggle":
        expected = "enable" if default else "disable"
    if there.default != expected:
        sentence = f"{flag.option} is {there.default} by default; the table has {expected}"
        what = "specpipe writes it, nothing to do" if written else "it is left to that"
        yield Difference(f"{sentence}: {what}")


def parse_template(text: str) -> pb.ModelConfig:
    """Parses a `config.pbtxt` with placeholders; raises ParseError.

    In text they stay. A data type becomes TYPE_INVALID, anything else the smallest true value.
    """
    text = re.sub(r"(data_type\s*:\s*)\$\{\w+\}", r"\1TYPE_INVALID", text)
    text = re.sub(r"(decoupled\s*:\s*)\$\{\w+\}", r"\1true", text)
    text = re.sub(r'("[^"\n]*")|\$\{\w+\}', lambda found: found[1] or "1", text)
    return text_format.Parse(text, pb.ModelConfig())


def template_differences(text: str, version: str) -> Iterator[Difference]:
    """Compares the template of an engine's model with the contract."""
    try:
        config = parse_template(text)
    except text_format.ParseError as exc:
        yield refused(f"it cannot be parsed: {exc}: compare it with contract.py by eye")
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
        yield Difference(f"parameter {key} is not in the contract: its default holds")
    for key, parameter in here.items():
        placeholder = parameter.placeholder
        expected = f"${{{placeholder}}}" if placeholder else parameter.value
        if key not in there:
            yield Difference(
                f"parameter {key} is in the contract, but not here: {_no_effect(parameter)}"
            )
        elif there[key] != expected:
            yield Difference(
                f"parameter {key} is '{there[key]}'; the contract has '{expected}': look whether "
                "what is written still means the same"
            )


def _no_effect(parameter: Parameter) -> str:
    if parameter.use == "setting":
        return f"leave engine.tensorrt_llm.parameters.{parameter.key} out, it may have no effect"
    return "what is written for it may have no effect"


def _tensor_differences(
    kind: str, declared: Any, expected: tuple[BackendTensor, ...]
) -> Iterator[Difference]:
    there = {tensor.name: tensor for tensor in declared}
    here = {tensor.name: tensor for tensor in expected}
    for name in sorted(there.keys() - here.keys()):
        yield Difference(f"{kind} {name} is not in the contract: nobody sends it, nothing to do")
    for name, tensor in here.items():
        if name not in there:
            yield refused(f"{kind} {name} is in the contract, but not here: {_SERVE_ELSEWHERE}")
            continue
        found, wanted = _describe(there[name]), _describe_expected(tensor)
        for field, value in found.items():
            if value != wanted[field] and "INVALID" not in str(value):
                yield refused(
                    f"{kind} {name}: {field} is {value}; the contract has {wanted[field]}: "
                    f"{_SERVE_ELSEWHERE}"
                )


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


def script_differences(text: str, words: Iterable[str]) -> Iterator[Difference]:
    """Looks for whole words; one that ends with `=` goes on with its value."""
    for word in words:
        end = "" if word.endswith("=") else r"(?![\w-])"
        if not re.search(rf"(?<![\w-]){re.escape(word)}{end}", text):
            yield Difference(
                f"it has no {word}, and `specpipe serve` says it: look whether a pair of several "
                "ranks starts"
            )


def backend_differences(folder: Path) -> Iterator[Difference]:
    """The worker is where the contract has it, and the library refuses what it is known to."""
    worker = next(p.value for p in contract.PARAMETERS if p.key == "executor_worker_path")
    if not (folder / Path(worker).name).is_file():
        yield refused(
            f"{folder / Path(worker).name} is missing, which engines of several ranks need: serve "
            "in NVIDIA's Triton image"
        )
    libraries = sorted(folder.glob("libtriton_tensorrtllm*.so"))
    texts = [text for path in libraries for text in _TEXTS.findall(path.read_bytes())]
    if not libraries:
        yield refused(
            f"{folder} has no libtriton_tensorrtllm.so: serve in NVIDIA's Triton image, or with "
            "engine.tensorrt_llm.backend pytorch"
        )
    elif not any(DECOUPLED_REFUSAL in text for text in texts):
        yield Difference(
            f"no library says '{DECOUPLED_REFUSAL.decode()}': look whether a stream comes in parts"
        )
    for text in sorted(set(texts)):
        if _REFUSES_DRAFTS.search(text):
            yield refused(
                "a library may refuse draft tokens of a decoupled model: "
                f"'{text.decode()}': {_SERVE_ELSEWHERE}"
            )
