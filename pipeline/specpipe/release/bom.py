"""The bill of materials of a version, as CycloneDX 1.6 has it for machine learning (ML-BOM).

draft, target        what is served, a model each; its checkpoint is its ancestor, with every file
data                 calibration texts and prompts
libraries            what converted, built and verified it

The same content gives the same bytes: the serial number follows from the digest of what is
described, and the time is that of the build.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from specpipe.checkpoints.licences import Licences
from specpipe.evaluate.nightly.record import Run
from specpipe.evaluate.verification.record import repository_digest
from specpipe.machine.manifest import FileRecord
from specpipe.release.built import BuiltPair, Checkpoint
from specpipe.release.figures import acceptance_rates
from specpipe.release.statements import Json, checkpoint_url, library_url
from specpipe.roles import ROLES, Role
from specpipe.runtimes.engine_description import EngineDescription
from specpipe.runtimes.pair_file import read_pair
from specpipe.runtimes.runtime import load_runtime

if TYPE_CHECKING:
    from cyclonedx.model.component import Component
    from cyclonedx.model.license import License

_NAMESPACE = uuid.UUID("5e0a8d2c-6a0e-5f43-9d0b-2f3d5a7c9b11")  # made up once, for serial numbers
_MODELS = "model_repo"  # the folder of hand-written Triton models, which are no data


def bill_of_materials(
    built: BuiltPair,
    licences: Mapping[Role, Licences],
    results: Mapping[str, Json],
    night: Run | None,
    digest: str,
) -> str:
    """Returns the document.

    results  what was proved and measured, whose prompts and libraries are named, too
    night    whose figures the model cards have
    digest   of what it describes
    """
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.model.tool import ToolRepository
    from cyclonedx.output.json import JsonV1Dot6

    pair = Component(
        type=ComponentType.APPLICATION,
        name=built.config.name,
        version=repository_digest(built.package.outputs),
        bom_ref="pair",
    )
    models = [_model(built, role, licences[role]) for role in ROLES]
    data = list({str(one.bom_ref): one for one in (*_texts(built), *_prompts(results))}.values())
    libraries = [_library(name, version) for name, version in _versions(built, results).items()]
    bom = Bom(
        serial_number=uuid.uuid5(_NAMESPACE, digest),
        metadata=BomMetaData(
            timestamp=datetime.fromisoformat(str(built.package.build["built_at"])),
            component=pair,
            tools=ToolRepository(
                components=[
                    _library("specpipe", built.package.versions["specpipe"], bom_ref="tool")
                ]
            ),
        ),
        components=[*models, *data, *libraries],
    )
    bom.register_dependency(pair, [*models, *libraries])
    for model in models:
        bom.register_dependency(model, data)
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    described = {role: _described(built, role) for role in ROLES}
    for component in document["components"]:
        # The library has no class for these two parts of the standard.
        if (role := component["bom-ref"]) in described:
            component["modelCard"] = _card(described[role], night, data)
        elif component["type"] == "data":
            component["data"] = [{"type": "dataset", "name": component["name"]}]
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _model(built: BuiltPair, role: Role, found: Licences) -> Component:
    """Returns what is served of one side, with the checkpoint that it was made from."""
    from cyclonedx.model import Property
    from cyclonedx.model.component import Component, ComponentType, Pedigree

    checkpoint = built.checkpoints[role]
    described = _described(built, role)
    facts: dict[str, Any] = {"runtime": read_pair(built.repository).runtime}
    scheme = getattr(built.config, role).quantization
    if scheme is not None:
        facts |= {"quantization": scheme.format, "kv_cache": scheme.kv_cache}
    if described is not None:
        facts |= {
            "num_layers": described.num_layers,
            "dtype": described.dtype,
            "weights_bytes": described.memory.weights_bytes,
            **described.quantization,
        }
    served = {
        f"{built.repository.name}/{name}": file
        for name, file in built.package.outputs.items()
        if role in PurePosixPath(name).parts
    }
    return Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        name=f"{built.config.name} {role}",
        bom_ref=role,
        licenses=_licences(role, found),
        components=[_file(name, name, file) for name, file in served.items()],
        pedigree=Pedigree(
            ancestors=[_ancestor(checkpoint, found)],
            notes="; ".join(
                manifest.stage
                for manifest in built.manifests.values()
                if manifest.stage.startswith(f"{role}/")
            ),
        ),
        properties=[
            Property(name=f"specpipe:{name}", value=str(value))
            for name, value in facts.items()
            if value is not None
        ],
    )


def _ancestor(checkpoint: Checkpoint, found: Licences) -> Component:
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    url = checkpoint_url(checkpoint)
    role = checkpoint.role
    return Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        name=checkpoint.name,
        version=checkpoint.commit,
        bom_ref=f"{role}/checkpoint",
        purl=None if url is None else PackageURL.from_string(url),
        licenses=_licences(role, found),
        components=[
            _file(name, f"{role}/checkpoint/{name}", file)
            for name, file in checkpoint.files.items()
        ],
    )


def _file(name: str, bom_ref: str, file: FileRecord) -> Component:
    from cyclonedx.model.component import Component, ComponentType

    return Component(
        type=ComponentType.FILE, name=name, bom_ref=bom_ref, hashes=[_sha256(file.sha256)]
    )


def _sha256(digest: str) -> Any:
    from cyclonedx.model import HashAlgorithm, HashType

    return HashType(alg=HashAlgorithm.SHA_256, content=digest)


def _licences(role: Role, found: Licences) -> Iterator[License]:
    """Yields licences as the model card declares them, by SPDX's id where it has one."""
    from cyclonedx.model import XsUri
    from cyclonedx.model.license import DisjunctiveLicense, LicenseAcknowledgement
    from cyclonedx.spdx import fixup_id

    declared = LicenseAcknowledgement.DECLARED
    for name in found.declared:
        if (spdx := fixup_id(name)) is not None:
            yield DisjunctiveLicense(id=spdx, acknowledgement=declared)
            continue
        link = found.link if found.link and found.link.startswith("https://") else None
        yield DisjunctiveLicense(
            name=(found.name or name) if name == "other" else name,
            url=None if link is None else XsUri(link),
            acknowledgement=declared,
        )
    if not found.declared:
        for name in found.files:
            yield DisjunctiveLicense(name=f"licenses/{role}/{name}", acknowledgement=declared)


def _texts(built: BuiltPair) -> Iterator[Component]:
    for name, file in built.others:
        if not name.startswith(f"{_MODELS}/"):
            yield _data(name, file.sha256)


def _prompts(results: Mapping[str, Json]) -> Iterator[Component]:
    """Yields the sets of prompts that results name, each once."""
    found = {
        str(prompts["digest"]): str(prompts["source"])
        for result in results.values()
        if isinstance(prompts := result.get("prompts"), dict)
    }
    for digest, source in found.items():
        yield _data(f"prompts {PurePosixPath(source).name}", digest)


def _data(name: str, digest: str) -> Component:
    from cyclonedx.model.component import Component, ComponentType

    return Component(
        type=ComponentType.DATA,
        name=name,
        bom_ref=f"data/{digest[:16]}/{name}",
        hashes=[_sha256(digest)],
    )


def _versions(built: BuiltPair, results: Mapping[str, Json]) -> dict[str, str]:
    """Returns the versions of libraries; those of the build, where results say others."""
    found: dict[str, str] = {}
    for result in results.values():
        found |= {
            name: version
            for name, version in result.get("versions", {}).items()
            if name not in ("python", "triton") and isinstance(version, str)
        }
    found |= built.versions
    return {name: v for name, v in sorted(found.items()) if v != "not installed"}


def _library(name: str, version: str, *, bom_ref: str | None = None) -> Component:
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    url = PackageURL.from_string(library_url(name, version))
    return Component(
        type=ComponentType.LIBRARY,
        name=url.name,
        version=version,
        purl=url,
        bom_ref=bom_ref or url.to_string(),
    )


def _described(built: BuiltPair, role: Role) -> EngineDescription | None:
    engine = [
        artifact
        for artifact, manifest in built.manifests.items()
        if manifest.stage.startswith(f"{role}/")
    ][-1]
    runtime = load_runtime(read_pair(built.repository).runtime)
    return runtime.describe(built.config.artifacts_dir / engine)


def _card(
    described: EngineDescription | None, night: Run | None, data: list[Component]
) -> dict[str, Any]:
    """Returns the model card: what the model is for, and the figures of the pair."""
    card: dict[str, Any] = {
        "modelParameters": {
            "task": "text-generation",
            "architectureFamily": "transformer",
            "datasets": [{"ref": str(one.bom_ref)} for one in data],
        }
    }
    if described is not None:
        card["modelParameters"]["modelArchitecture"] = described.architecture
    if metrics := list(_metrics(night)):
        card["quantitativeAnalysis"] = {"performanceMetrics": metrics}
    return card


def _metrics(night: Run | None) -> Iterator[dict[str, Any]]:
    for what, rate in acceptance_rates(night).items():
        yield _metric("acceptance rate, greedy", what, rate.value, rate.low, rate.high)
    for gain in () if night is None else night.speed_ups:
        if gain.ratio is not None:
            what = f"concurrency {gain.concurrency}"
            yield _metric("speed-up over the target alone", what, gain.ratio, gain.low, gain.high)


def _metric(
    kind: str, what: str, value: float, low: float | None, high: float | None
) -> dict[str, Any]:
    metric: dict[str, Any] = {"type": kind, "slice": what, "value": f"{value:.6g}"}
    if low is not None and high is not None:
        metric["confidenceInterval"] = {"lowerBound": f"{low:.6g}", "upperBound": f"{high:.6g}"}
    return metric
