"""Statements and bill of materials of a version, read by the libraries of their standards."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cyclonedx")
pytest.importorskip("in_toto_attestation")

from cyclonedx.model.bom import Bom  # noqa: E402
from cyclonedx.schema import SchemaVersion  # noqa: E402
from cyclonedx.validation.json import JsonStrictValidator  # noqa: E402
from google.protobuf import json_format  # noqa: E402
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2  # noqa: E402
from in_toto_attestation.v1 import statement_pb2  # noqa: E402
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor  # noqa: E402
from in_toto_attestation.v1.statement import Statement  # noqa: E402

from specpipe.build.load import load_config  # noqa: E402
from specpipe.checkpoints.licences import Licences, find_licences  # noqa: E402
from specpipe.config.sections import PipelineConfig  # noqa: E402
from specpipe.errors import RepositoryError  # noqa: E402
from specpipe.machine.manifest import record_files  # noqa: E402
from specpipe.release import statements  # noqa: E402
from specpipe.release.assembly import assemble  # noqa: E402
from specpipe.release.bom import bill_of_materials  # noqa: E402
from specpipe.release.built import BuiltPair, read_built  # noqa: E402
from specpipe.version import __version__  # noqa: E402
from tests.release.built_pair import copied, read, write_verification  # noqa: E402

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SECRETS = {"HF_TOKEN": "hf_7dd1", "AWS_SECRET_ACCESS_KEY": "aws_91ab", "HOME": "/home/jane_doe"}


@pytest.fixture(scope="module")
def released(
    built_once: PipelineConfig, tmp_path_factory: pytest.TempPathFactory
) -> PipelineConfig:
    """A built pair that has a version 1; not to be changed."""
    config = copied(built_once, tmp_path_factory.mktemp("released") / "moved")
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in SECRETS.items():
            monkeypatch.setenv(name, value)
        assemble(config, 1, config.artifacts.versions / "1")
    return config


@pytest.fixture
def version(released: PipelineConfig) -> Path:
    return released.artifacts.versions / "1"


def parsed(statement: Any) -> Statement:
    """Reads a statement with in-toto's own messages, which refuse a field they do not know."""
    message = json_format.ParseDict(dict(statement), statement_pb2.Statement())
    whole = Statement.copy_from_pb(message)
    whole.validate()
    return whole


def slsa(statement: Any) -> Any:
    """Reads the provenance of SLSA with its message; checks what it wants of dependencies."""
    found = json_format.ParseDict(statement["predicate"], provenance_pb2.Provenance())
    dependencies = found.build_definition.resolved_dependencies
    for descriptor in (*dependencies, *found.run_details.byproducts):
        ResourceDescriptor.copy_from_pb(descriptor).validate()
    return found


def test_every_statement_is_about_the_files_of_the_repository(version: Path) -> None:
    found = {path.stem: read(path) for path in (version / "attestations").iterdir()}
    assert {name: parsed(one).pb.predicate_type for name, one in found.items()} == {
        "provenance": "https://slsa.dev/provenance/v1",
        "verification": "pkg:pypi/specpipe-llm#verification/v1",
        "acceptance": "pkg:pypi/specpipe-llm#acceptance/v1",
        "bench": "pkg:pypi/specpipe-llm#bench/v1",
    }
    files = {
        f"model_repo/{name}": {"sha256": file.sha256}
        for name, file in record_files(version / "model_repo").items()
    }
    for one in found.values():
        subject = {entry.name: dict(entry.digest) for entry in parsed(one).pb.subject}
        assert subject == files


def test_provenance_says_what_was_built_from_what(version: Path, released: PipelineConfig) -> None:
    statement = read(version / "attestations/provenance.json")
    found = slsa(statement)
    definition, details = found.build_definition, found.run_details
    assert definition.build_type == "pkg:pypi/specpipe-llm#build/v1"
    assert details.builder.id == "pkg:pypi/specpipe-llm"
    assert dict(details.builder.version) == {"specpipe": __version__}
    started, finished = details.metadata.started_on, details.metadata.finished_on
    assert 0 <= finished.seconds - started.seconds < 600
    external = statement["predicate"]["buildDefinition"]["externalParameters"]
    assert external["config"] == released.model_dump(mode="json")
    internal = statement["predicate"]["buildDefinition"]["internalParameters"]
    assert list(internal["stages"]) == [
        "check",
        "draft/convert",
        "draft/build_engine",
        "target/convert",
        "target/build_engine",
        "package",
    ]
    assert internal["stages"]["package"]["settings"]["num_draft_tokens"] == 3
    dependencies = {one.name: dict(one.digest) for one in definition.resolved_dependencies}
    files = {
        f"{role}/{name}": {"sha256": file.sha256}
        for role in ("draft", "target")
        for name, file in record_files(released.base_dir / role).items()
        if name.endswith((".json", ".safetensors"))
    }
    assert {name: dependencies[name] for name in files} == files
    assert "model_repo/speculative/1/model.py" in dependencies
    uris = {one.name: one.uri for one in definition.resolved_dependencies}
    assert uris["specpipe"] == f"pkg:pypi/specpipe-llm@{__version__}"


def test_a_hub_s_checkpoint_is_named_by_its_commit(released: PipelineConfig) -> None:
    pair = read_built(released)
    draft = replace(pair.checkpoints["draft"], name="org/toy", commit=COMMIT)
    lock = {
        "stages": {
            "target/build_engine": {
                "settings": {"image": "tritonserver:25.08"},
                "tool": {"image_digest": f"sha256:{'c' * 64}"},
            },
            "draft/build_engine": "damaged",
        }
    }
    engine = replace(pair.manifests["target/engine"], settings={"image": "tritonserver:25.08"})
    changed = replace(
        pair,
        checkpoints={**pair.checkpoints, "draft": draft},
        manifests={**pair.manifests, "target/engine": engine},
    )
    found = slsa(statements.provenance(changed, (lock, "d" * 64)))
    dependencies = {one.name: one for one in found.build_definition.resolved_dependencies}
    assert dependencies["draft"].uri == f"pkg:huggingface/org/toy@{COMMIT}"
    assert dict(dependencies["draft"].digest) == {"gitCommit": COMMIT}
    assert dependencies["draft/config.json"].uri == (
        f"pkg:huggingface/org/toy@{COMMIT}#config.json"
    )
    image = dependencies["target/build_engine: tritonserver:25.08"]
    assert dict(image.digest) == {"sha256": "c" * 64}
    (lockfile,) = found.run_details.byproducts
    assert (lockfile.name, dict(lockfile.digest)) == ("pair.lock", {"sha256": "d" * 64})


def test_a_checkpoint_in_the_hub_s_cache_is_known_by_where_it_lies(
    built: PipelineConfig, built_once: PipelineConfig
) -> None:
    cached = f"/cache/models--org--a--toy/snapshots/{COMMIT}/"
    for path in built.artifacts_dir.rglob("*.manifest.json"):
        path.write_text(path.read_text().replace(f"{built_once.base_dir}/draft/", cached))
    draft = read_built(built).checkpoints["draft"]
    assert (draft.name, draft.commit) == ("org/a--toy", COMMIT)
    assert draft.folder == Path(cached) and "model.safetensors" in draft.files
    # It is gone from the cache: that is noted, and nothing is taken from elsewhere.
    assert find_licences("draft", draft.name, draft.folder).notes == (
        "no licence file found: the draft's checkpoint org/a--toy is no longer where it was built "
        "from",
    )


def test_verdict_acceptance_and_speed_are_those_of_the_results(version: Path) -> None:
    found = {path.stem: read(path)["predicate"] for path in (version / "attestations").iterdir()}
    proved = read(version / "verification.json")
    del proved["repository"]
    assert found["verification"] == proved
    greedy = found["acceptance"]["greedy"]
    assert (greedy["num_draft_tokens"], greedy["num_accepted_tokens"]) == (36, 13)
    assert greedy["prompts"][0]["accepted_at"] == [2, 1, 1]
    assert {what: round(rate["value"], 4) for what, rate in greedy["rates"].items()} == {
        "all prompts": round(13 / 36, 4),
        "position 1": round(7 / 12, 4),
        "position 2": round(3 / 7, 4),
        "position 3": 1.0,
    }
    assert [(c["check"], c["rate"]) for c in found["acceptance"]["checks"]] == [
        ("greedy", 13 / 36),
        ("seeded", 12 / 39),
    ]
    assert found["bench"]["loads"] == [
        {
            "concurrency": 1,
            "comparison": {
                "concurrency": 1,
                "ratio": 1.3,
                "low": 1.2,
                "high": 1.4000000000000001,
                "confidence": 0.95,
                "outcome": "gain",
            },
        }
    ]
    assert found["bench"]["conditions"]["machine"]["cpu"] == "a processor"


def test_what_was_not_looked_at_is_not_attested(built: PipelineConfig) -> None:
    built.artifacts.verification.unlink()
    shutil.rmtree(built.artifacts.result("nightly").parent)
    assemble(built, 1, built.artifacts.versions / "1")
    names = [path.name for path in (built.artifacts.versions / "1/attestations").iterdir()]
    assert names == ["provenance.json"]


def test_nothing_of_the_environment_gets_into_a_document(version: Path) -> None:
    documents = [p for p in version.rglob("*") if p.is_file() and p.suffix != ".safetensors"]
    text = "\n".join(path.read_text() for path in documents)
    assert [value for value in SECRETS.values() if value in text] == []


def test_a_password_in_the_yaml_is_not_published(built: PipelineConfig) -> None:
    store = "release.store=ssh://jane:geheim@host/path"
    with pytest.raises(RepositoryError) as caught:
        assemble(load_config(built.source, [store]), 1, built.artifacts.versions / "1")
    assert "release.store in " in str(caught.value) and "geheim" not in str(caught.value)


def components(document: Any) -> dict[str, Any]:
    found = {}
    for one in document.get("components", ()):
        found |= {one["bom-ref"]: one, **components(one), **components(one.get("pedigree", {}))}
        found |= {a["bom-ref"]: a for a in one.get("pedigree", {}).get("ancestors", ())}
    return found


def test_the_bill_of_materials_is_what_cyclonedx_reads(version: Path) -> None:
    text = (version / "bom.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    document = json.loads(text)
    # The library knows no model cards, and reads all the rest.
    plain = json.loads(text)
    for one in plain["components"]:
        one.pop("modelCard", None), one.pop("data", None)
    bom = Bom.from_json(plain)  # type: ignore[attr-defined]
    assert bom.metadata.component.name == "pair"
    found = components(document)
    assert found["draft"]["licenses"] == [
        {"license": {"acknowledgement": "declared", "id": "Apache-2.0"}}
    ]
    assert "licenses" not in found["target"]
    facts = {one["name"]: one["value"] for one in found["target"]["properties"]}
    assert facts == {
        "specpipe:runtime": "torch",
        "specpipe:num_layers": "6",
        "specpipe:dtype": "float32",
        "specpipe:weights_bytes": str(4 * 5_475_584),  # parameters, in float32
    }
    (ancestor,) = found["target"]["pedigree"]["ancestors"]
    assert ancestor["bom-ref"] == "target/checkpoint" and ancestor["name"] == "target"
    hashes = {file["name"]: file["hashes"][0]["content"] for file in ancestor["components"]}
    weights = record_files(version / "model_repo")["speculative/1/target/model.safetensors"]
    assert len(hashes) == 5
    served = found["model_repo/speculative/1/target/model.safetensors"]
    assert served["hashes"] == [{"alg": "SHA-256", "content": weights.sha256}]
    prompts = next(one for one in document["components"] if one["type"] == "data")
    assert prompts["name"] == "prompts code" and prompts["hashes"][0]["content"] == "9b" * 32
    card = found["draft"]["modelCard"]
    assert card["modelParameters"] == {
        "task": "text-generation",
        "architectureFamily": "transformer",
        "modelArchitecture": "LlamaForCausalLM",
        "datasets": [{"ref": prompts["bom-ref"]}],
    }
    assert card["quantitativeAnalysis"]["performanceMetrics"][0] == {
        "type": "acceptance rate, greedy",
        "slice": "all prompts",
        "value": "0.361111",
        "confidenceInterval": {"lowerBound": "0.203538", "upperBound": "0.518685"},
    }
    libraries = {one["purl"] for one in document["components"] if one["type"] == "library"}
    assert {f"pkg:pypi/specpipe-llm@{__version__}", "pkg:pypi/torch@2.13.0%2Bcpu"} <= libraries


def test_equal_content_gives_equal_bytes_and_other_content_another_serial_number(
    built: PipelineConfig,
) -> None:
    versions = built.artifacts.versions
    assemble(built, 1, versions / "1")
    assemble(built, 2, versions / "2", published_at="2027-01-01T00:00:00+00:00")
    bom = (versions / "1/bom.cdx.json").read_bytes()
    assert (versions / "2/bom.cdx.json").read_bytes() == bom
    write_verification(built)
    other = read(built.artifacts.verification) | {"made_at": "2027-01-01T00:00:00+00:00"}
    built.artifacts.verification.write_text(json.dumps(other))
    assemble(built, 3, versions / "3")
    serial = {read(versions / f"{n}/bom.cdx.json")["serialNumber"] for n in (1, 3)}
    assert len(serial) == 2


def test_a_licence_has_its_spdx_id_or_its_name(released: PipelineConfig, tmp_path: Path) -> None:
    pair = read_built(released)
    (tmp_path / "LICENSE").write_text("text")
    nothing = Licences(files={})
    for card, licence in (
        ("license: Apache-2.0", {"id": "Apache-2.0"}),
        ("license: llama3.1", {"name": "llama3.1"}),
        (
            "license: other\nlicense_name: own\nlicense_link: https://host/LICENSE",
            {"name": "own", "url": "https://host/LICENSE"},
        ),
        ("license: other\nlicense_name: own\nlicense_link: LICENSE", {"name": "own"}),
        ("tags: [a]", {"name": "licenses/draft/LICENSE"}),
    ):
        (tmp_path / "README.md").write_text(f"---\n{card}\n---\n")
        found = find_licences("draft", "draft", tmp_path)
        text = bill_of_materials(pair, {"draft": found, "target": nothing}, {}, None, "a digest")
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
        assert components(json.loads(text))["draft"]["licenses"] == [
            {"license": {"acknowledgement": "declared", **licence}}
        ]


def test_a_pair_that_was_moved_is_read_by_where_it_was(built: PipelineConfig) -> None:
    """The fixture moved it: its manifests name folders that are those of the first one."""
    pair: BuiltPair = read_built(built)
    assert str(built.base_dir) not in pair.package.inputs[0].path
    assert list(pair.manifests)[-1] == "model_repo" and len(pair.manifests) == 6


def test_a_checkout_that_bears_the_pairs_name_is_no_part_of_the_pair(
    built: PipelineConfig,
) -> None:
    """Its hand-written models lie in `pair/model_repo`, as the pair's own repository does."""
    others = read_built(built).others
    path = built.artifacts_dir / "model_repo.manifest.json"
    manifest = read(path)
    models = manifest["inputs"][-1]
    assert "speculative/1/model.py" in models["files"]
    models["path"] = "/srv/pair/model_repo"
    path.write_text(json.dumps(manifest))
    assert read_built(built).others == others
