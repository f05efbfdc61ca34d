"""Checks a Triton repository offline: what Triton refuses, and what it loads, then serves wrongly.

Each rule is a function from a `Repository` to sentences, one for each fault. What Triton 2.51 does
with a fault that it loads:

(1) two instances of a model behind a decoupled one send chunks out of order;
(2) a missing required input of an ensemble is answered by an empty success;
(3) a quoted `${placeholder}` parses, and fails at the first request.

An ensemble output with the name of an input, and a second decoupled step, it refuses to load.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tritonclient.grpc import model_config_pb2 as pb

from specpipe.config.limits import ServedLimits
from specpipe.errors import RepositoryError, to_sentence
from specpipe.machine.own_json import reason
from specpipe.runtimes.config_pbtxt import parameter, read_config
from specpipe.runtimes.pair_file import PairFile
from specpipe.runtimes.repository_rule import LintRule, Repository, ServedPair
from specpipe.runtimes.runtime import load_runtime
from specpipe.triton import serving
from specpipe.triton.model_config import (
    CALLS_SUFFIX,
    CANCELS,
    DRAFT_ENGINE_DIR,
    LIMITS_FILE,
    PAIR_FILE,
    PATH_SUFFIXES,
    TARGET_ENGINE_DIR,
)

_PLACEHOLDER = re.compile(r"\$\{[^}\n]*\}?")
_KEY_BEFORE = re.compile(r"(\w+)\s*:\s*\"?[^\":]*$")
_PARAMETER_KEY = re.compile(r"key\s*:\s*\"([^\"]*)\"")


def check(folder: Path) -> None:
    """Raises RepositoryError with every fault of the repository."""
    faults = lint(folder)
    if faults:
        listed = "".join(f"\n  {fault}" for fault in faults)
        raise RepositoryError(f"the Triton repository {folder} would not serve:{listed}")


def lint(folder: Path) -> list[str]:
    """Returns every fault of the repository as a sentence that begins with the model's name."""
    names = (
        sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    )
    if not names:
        return [f"{folder} holds no models"]
    faults = [fault for name in names for fault in _placeholders(folder / name / "config.pbtxt")]
    models = {}
    for name in names:
        try:
            models[name] = read_config(folder / name / "config.pbtxt")
        except RepositoryError as exc:
            if not any(fault.startswith(f"{name}/config.pbtxt:") for fault in faults):
                faults.append(f"{name}: {exc}")
    repository = Repository(folder, models)
    return faults + [fault for rule in RULES for fault in _apply(rule, repository)]


def _apply(rule: LintRule, repository: Repository) -> Iterator[str]:
    """What a rule finds; also where a file of the repository has not the form that it takes."""
    try:
        yield from rule(repository)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OSError) as exc:
        yield f"its files are not what this specpipe builds ({reason(exc)}): build again"


def _placeholders(path: Path) -> Iterator[str]:
    """Yields (3), from the text, since an unquoted placeholder does not even parse."""
    if not path.is_file():
        return
    key = ""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if named := _PARAMETER_KEY.search(line):
            key = named[1]
        for placeholder in _PLACEHOLDER.finditer(line):
            before = _KEY_BEFORE.search(line[: placeholder.start()])
            field = before[1] if before else "?"
            where = key if field == "string_value" else field
            yield f"{path.parent.name}/config.pbtxt: {where} is the placeholder {placeholder[0]}"


def _files(repository: Repository) -> Iterator[str]:
    """Yields what a model needs and has not in its own folder, wherever the repository lies."""
    for name, config in repository.models.items():
        version = repository.version_folder(name)
        if config.name and config.name != name:
            yield f"{name}: its config.pbtxt names the model '{config.name}'"
        if not version.is_dir():
            yield f"{name}: the version folder {version} is missing"
            continue
        if config.backend == "python" and not (version / "model.py").is_file():
            yield f"{name}: {version / 'model.py'} is missing"
        for key, value in config.parameters.items():
            if not key.endswith(PATH_SUFFIXES):
                continue
            relative = Path(value.string_value)
            if relative.is_absolute() or ".." in relative.parts:
                yield f"{name}: {key} '{relative}' leads out of the version folder"
            elif not (version / relative).exists():
                yield f"{name}: {key} '{relative}' does not exist in {version}"
    root = repository.folder.resolve()
    for path in sorted(repository.folder.rglob("*")):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            relative = path.relative_to(repository.folder)
            yield f"{relative.parts[0]}: {relative} is a link out of the repository"


@dataclass(frozen=True)
class _End:
    """A place where an ensemble tensor is written or read, and how that place declares it."""

    tensor: str
    place: str
    dtype: str
    rank: int

    @classmethod
    def of(cls, tensor: str, place: str, config: pb.ModelConfig, declared: Any) -> _End:
        """Returns an end; its rank counts the batch dimension, where there is one."""
        dtype = pb.DataType.Name(declared.data_type).removeprefix("TYPE_")
        return cls(tensor, place, dtype, len(declared.dims) + (config.max_batch_size > 0))


def _steps(repository: Repository) -> Iterator[str]:
    """Yields steps that name no model, map what it has not, or leave out a required input."""
    for ensemble in repository.ensembles():
        for step in ensemble.ensemble_scheduling.step:
            model = repository.models.get(step.model_name)
            if model is None:
                yield (
                    f"{ensemble.name}: the step '{step.model_name}' is not a model of the "
                    "repository"
                )
                continue
            outputs = {declared.name for declared in model.output}
            inputs = {declared.name for declared in model.input}
            required = {declared.name for declared in model.input if not declared.optional}
            for kind, unknown in (
                ("input", set(step.input_map) - inputs),
                ("output", set(step.output_map) - outputs),
            ):
                for name in sorted(unknown):
                    yield f"{ensemble.name}: {model.name} has no {kind} '{name}'"
            for name in sorted(required - set(step.input_map)):
                yield f"{ensemble.name}: {model.name}'s input '{name}' is required, but not mapped"


def _tensors(repository: Repository) -> Iterator[str]:
    """Yields ensemble tensors without one producer, a reader, or one type and rank at all ends."""
    for ensemble in repository.ensembles():
        producers: dict[str, _End] = {}
        for end in (*_own_ends(ensemble, "input"), *_step_ends(repository, ensemble, "output")):
            first = producers.setdefault(end.tensor, end)
            if first is not end:
                yield (
                    f"{ensemble.name}: tensor '{end.tensor}' has two producers: {first.place} "
                    f"and {end.place}"
                )
        readers = [*_step_ends(repository, ensemble, "input"), *_own_ends(ensemble, "output")]
        for reader in readers:
            producer = producers.get(reader.tensor)
            named = f"{ensemble.name}: tensor '{reader.tensor}'"
            if producer is None:
                yield f"{named}, read by {reader.place}, has no producer"
                continue
            for relation, written, read in (
                ("is", producer.dtype, reader.dtype),
                ("has rank", producer.rank, reader.rank),
            ):
                if written != read:
                    yield (
                        f"{named} {relation} {written} from {producer.place}, but {read} at "
                        f"{reader.place}"
                    )
        unread = {tensor.name for tensor in ensemble.input} - {end.tensor for end in readers}
        for name in sorted(unread):
            yield f"{ensemble.name}: input '{name}' is read by no step"


def _own_ends(ensemble: pb.ModelConfig, kind: Literal["input", "output"]) -> Iterator[_End]:
    for declared in getattr(ensemble, kind):
        yield _End.of(declared.name, f"the ensemble's {kind}", ensemble, declared)


def _step_ends(
    repository: Repository, ensemble: pb.ModelConfig, kind: Literal["input", "output"]
) -> Iterator[_End]:
    for step in ensemble.ensemble_scheduling.step:
        model = repository.models.get(step.model_name, pb.ModelConfig())
        tensors = getattr(step, f"{kind}_map")
        for declared in getattr(model, kind):
            if declared.name in tensors:
                place = f"{model.name}'s {kind} {declared.name}"
                yield _End.of(tensors[declared.name], place, model, declared)


def _face(repository: Repository) -> Iterator[str]:
    """Yields (2), and outputs that bear the name of an input."""
    for ensemble in repository.ensembles():
        inputs = {i.name for i in ensemble.input}
        for i in ensemble.input:
            if not i.optional:
                yield f"{ensemble.name}: input '{i.name}' is required; declare it optional"
        for output in ensemble.output:
            if output.name in inputs:
                yield f"{ensemble.name}: output '{output.name}' bears the name of an input"


def _decoupled(repository: Repository) -> Iterator[str]:
    """Yields callers that take exactly one response of a model that may send several, or none."""
    for caller in repository.models.values():
        called = [step.model_name for step in caller.ensemble_scheduling.step]
        called += [
            value.string_value
            for key, value in sorted(caller.parameters.items())
            if key.endswith(CALLS_SUFFIX)
        ]
        decoupled = [name for name in called if _is_decoupled(repository, name)]
        if decoupled and not caller.model_transaction_policy.decoupled:
            yield (
                f"{caller.name}: model_transaction_policy.decoupled is false, but it calls "
                f"{', '.join(decoupled)}, where it is true"
            )
        if caller.platform == "ensemble" and len(decoupled) > 1:
            yield f"{caller.name}: two steps are decoupled ({', '.join(decoupled)}); one may be"


def _order(repository: Repository) -> Iterator[str]:
    """Yields (1)."""
    for ensemble in repository.ensembles():
        is_behind = False
        for step in ensemble.ensemble_scheduling.step:
            model = repository.models.get(step.model_name)
            if model is None:
                continue
            num_instances = sum(group.count for group in model.instance_group)
            if is_behind and num_instances != 1:
                yield (
                    f"{model.name}: instance_group has {num_instances} instances; it must have 1, "
                    "since two would send the chunks of a request out of order"
                )
            is_behind = is_behind or model.model_transaction_policy.decoupled


def _cancellation(repository: Repository) -> Iterator[str]:
    for name, config in repository.models.items():
        target = parameter(config, CANCELS)
        if target is not None and target not in repository.models:
            yield f"{name}: {CANCELS} '{target}' is not a model of the repository"


def _requests(repository: Repository) -> Iterator[str]:
    """Yields models that write or read our requests as another release did: without limits, which
    they read when loaded, or with the prompt in another tensor.
    """
    for name, config in repository.models.items():
        for kind, declared in (("input", config.input), ("output", config.output)):
            names = {tensor.name for tensor in declared}
            if serving.REQUEST.name not in names:
                continue
            if serving.PROMPT_TOKEN_IDS.name not in names:
                yield (
                    f"{name}: it has no {kind} '{serving.PROMPT_TOKEN_IDS.name}', as older "
                    "releases wrote it; build again"
                )
            yield from _limits_faults(repository, name, config)


def _limits_faults(repository: Repository, name: str, config: pb.ModelConfig) -> Iterator[str]:
    file = parameter(config, LIMITS_FILE)
    if file is None:
        yield f"{name}: it names no {LIMITS_FILE}, as older releases wrote it; build again"
        return
    path = repository.version_folder(name) / file
    try:
        ServedLimits.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        yield f"{name}: {path} holds no limits ({to_sentence(exc)})"


def _pairs(repository: Repository) -> Iterator[str]:
    """What the runtime of a pair asks of the repository."""
    for name, config in repository.models.items():
        paths = [parameter(config, k) for k in (PAIR_FILE, DRAFT_ENGINE_DIR, TARGET_ENGINE_DIR)]
        if None in paths:
            continue
        version = repository.version_folder(name)
        file, draft, target = (version / str(path) for path in paths)
        try:
            pair = PairFile.read(file)
        except RepositoryError as exc:
            yield f"{name}: {exc}"
            continue
        served = ServedPair(
            model=name, version=version, draft=draft, target=target, options=pair.options
        )
        yield from load_runtime(pair.runtime).lint(repository, served)


RULES: tuple[LintRule, ...] = (
    _files,
    _steps,
    _tensors,
    _face,
    _decoupled,
    _order,
    _cancellation,
    _requests,
    _pairs,
)


def _is_decoupled(repository: Repository, name: str) -> bool:
    config = repository.models.get(name)
    return config is not None and bool(config.model_transaction_policy.decoupled)
