"""What `specpipe diff` shows of two versions, and of what is built now."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("packageurl")

from specpipe.build.load import load_config  # noqa: E402
from specpipe.cli.diff import diff  # noqa: E402
from specpipe.cli.group import main  # noqa: E402
from specpipe.cli.publish import publish  # noqa: E402
from specpipe.config.sections import PipelineConfig  # noqa: E402
from specpipe.errors import RepositoryError  # noqa: E402
from specpipe.release.assembly import assemble  # noqa: E402
from specpipe.release.documents import DOCUMENTS, read_documents  # noqa: E402
from tests.release.built_pair import accepted, build, copied, read, write_night, write_verification  # noqa: E402

QUALITY: dict[str, Any] = {
    "models": [
        {
            "role": "target",
            "plain": {"name": "plain", "weights_bytes": 100, "kv_cache_bytes_per_token": 10},
            "quantized": {"name": "fp8", "weights_bytes": 50, "kv_cache_bytes_per_token": 10},
            "divergence": {
                "num_positions": 9,
                "plain_perplexity": 2.0,
                "perplexity": 2.1,
                "mean_kl": 0.0125,
                "top1_agreement": 0.97,
                "perplexity_ratio": 1.05,
            },
            "texts": "a file",
        }
    ],
    "engines": "cpu",
    "num_draft_tokens": 3,
    "num_prompts": 0,
    "acceptance": [],
    "warnings": [],
    "acceptance_ratio": None,
}


@pytest.fixture(scope="module")
def changed(built_once: PipelineConfig, tmp_path_factory: pytest.TempPathFactory) -> PipelineConfig:
    """Version 1, and version 2 with another draft, setting and figures; not to be changed."""
    config = copied(built_once, tmp_path_factory.mktemp("changed") / "moved")
    versions = config.artifacts.versions
    assemble(config, 1, versions / "1")
    yaml = config.source.read_text()
    config.source.write_text(yaml.replace("num_draft_tokens: 3", "num_draft_tokens: 2"))
    card = config.base_dir / "draft" / "generation_config.json"
    card.write_text(json.dumps({**read(card), "temperature": 0.5}))
    config = load_config(config.source)
    build(config)
    write_verification(config)
    write_night(config, ratio=1.1, machine={"cpu": "another", "num_cores": 2, "gpus": []})
    night = config.artifacts.result("nightly")
    night.write_text(
        json.dumps({**read(night), "acceptance": accepted({"a": (1,), "b": (2,), "c": (1,)})})
    )
    assemble(config, 2, versions / "2")
    return config


def run(config: PipelineConfig, *arguments: str) -> str:
    result = CliRunner().invoke(diff, [*arguments, "--config", str(config.source)])
    assert result.exit_code == 0, result.output
    return result.output


def table(output: str) -> dict[tuple[str, str], Sequence[str]]:
    """Returns the cells of each row by kind and name."""
    rows = [[cell.strip() for cell in line.split("  ") if cell] for line in output.splitlines()]
    return {(row[0], row[1]): row[2:] for row in rows[1:]}


def test_each_kind_of_difference_is_shown_and_nothing_else(changed: PipelineConfig) -> None:
    output = run(changed, "1", "2")
    assert output.splitlines()[0].split() == ["version", "1", "version", "2"]
    rows = table(output)
    digests = rows.pop(("input", "draft/generation_config.json"))
    assert [len(digest) for digest in digests] == [12, 12]
    assert rows == {
        ("setting", "speculation.num_draft_tokens"): ["3", "2"],
        ("acceptance", "all prompts"): ["0.361 (0.204 to 0.519)", "0.111 (0.001 to 0.222)"],
        ("acceptance", "position 1"): ["0.583 (0.241 to 0.925)", "0.333 (0.062 to 0.604)"],
        ("acceptance", "position 2"): ["0.429 (0.000 to 0.878)", "none"],
        ("acceptance", "position 3"): ["1.000 (0.447 to 1.000)", "none"],
        ("speed-up", "at concurrency 1"): ["1.30 (1.20 to 1.40)", "1.10 (1.00 to 1.20)"],
    }


def test_programs_get_the_values(changed: PipelineConfig) -> None:
    found = json.loads(run(changed, "1", str(changed.artifacts.versions / "2"), "--json"))
    assert found["before"] == "version 1"
    by_name = {one["name"]: one for one in found["differences"]}
    assert by_name["all prompts"]["kind"] == "acceptance"
    assert by_name["all prompts"]["before"]["value"] == 13 / 36
    assert by_name["position 3"]["after"] is None
    assert by_name["at concurrency 1"]["before"]["ratio"] == 1.3
    assert len(by_name["draft/generation_config.json"]["after"]) == 64


def test_what_is_built_now_is_the_version_that_it_became(changed: PipelineConfig) -> None:
    assert run(changed, "2", "built") == "no difference between version 2 and built\n"
    assert run(changed, "1", "built").splitlines()[1:] == run(changed, "1", "2").splitlines()[1:]


def test_a_build_that_was_not_verified_says_so(built: PipelineConfig) -> None:
    assemble(built, 1, built.artifacts.versions / "1")
    config = load_config(built.source, ["speculation.adaptive=false"])
    build(config)  # the records are those of the build before
    rows = table(run(config, "1", "built", "--set", "speculation.adaptive=false"))
    assert rows["setting", "speculation.adaptive"] == ["true", "false"]
    assert rows["verification", "verdict"] == ["identical", "not verified"]
    assert rows["verification", "numerical ties"] == ["0", "none"]
    assert rows["acceptance", "all prompts"] == ["0.361 (0.204 to 0.519)", "none"]


def test_a_store_is_asked_for_the_documents_alone(built: PipelineConfig, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for ratio in (1.3, 1.2):
        write_night(built, ratio=ratio)
        published = CliRunner().invoke(
            publish, ["--config", str(built.source), "--store", str(store)]
        )
        assert published.exit_code == 0, published.output
    weights = [path for path in store.rglob("*") if path.is_file() and path.stat().st_size > 10**6]
    assert len(weights) == 2
    for path in weights:
        path.unlink()
    elsewhere = load_config(built.source, [f"output_dir={tmp_path / 'nothing'}"])
    words = ["--store", str(store), "--set", f"output_dir={tmp_path / 'nothing'}"]
    output = run(elsewhere, "1", "2", *words)
    assert table(output) == {
        ("speed-up", "at concurrency 1"): ["1.30 (1.20 to 1.40)", "1.20 (1.10 to 1.30)"]
    }
    assert not elsewhere.artifacts_dir.exists()
    unknown = CliRunner().invoke(main, ["diff", "1", "7", "--config", str(built.source), *words])
    assert unknown.exit_code == 1
    assert unknown.stderr.endswith("has no version 7 of pair, it has 1, 2\n")


def test_what_is_no_version_is_refused(changed: PipelineConfig) -> None:
    for words, reason in (
        (["1", "7"], "names no place of versions: set release.store, or give --store URL"),
        (["nowhere", "1"], "nowhere is no version: nowhere has no attestations/provenance.json"),
    ):
        result = CliRunner().invoke(main, ["diff", *words, "--config", str(changed.source)])
        assert result.exit_code == 1 and reason in result.stderr


def test_quality_sizes_and_libraries_are_compared(changed: PipelineConfig, tmp_path: Path) -> None:
    folder = shutil.copytree(changed.artifacts.versions / "1", tmp_path / "other")
    (folder / "results" / "quality.json").write_text(json.dumps(QUALITY))
    path = folder / "attestations" / "provenance.json"
    statement = read(path)
    dependencies = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    library = next(one for one in dependencies if one["name"] == "tokenizers")
    library["uri"] = "pkg:pypi/tokenizers@0.1%2Blocal"
    path.write_text(json.dumps(statement))
    manifest = folder / "model_repo.manifest.json"
    data = read(manifest)
    data["outputs"]["speculative/1/draft/model.safetensors"]["size"] += 10**9
    manifest.write_text(json.dumps(data))
    rows = table(run(changed, "1", str(folder)))
    assert rows["library", "tokenizers"][1] == "0.1+local"
    assert rows["size", "draft engine"][1].startswith("1.0 GB (1,00")
    assert ("size", "target engine") not in rows and ("size", "repository") in rows
    assert {name: cells for (kind, name), cells in rows.items() if kind == "quality"} == {
        "target in fp8: perplexity ratio": ["none", "1.05"],
        "target in fp8: mean KL, nats": ["none", "0.0125"],
        "target in fp8: top-1 agreement": ["none", "0.97"],
    }


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("attestations/provenance.json", "[]", "cannot be read: it holds no JSON object"),
        ("attestations/provenance.json", "{}", "is no provenance that specpipe wrote: it has no"),
        (
            "results/quality.json",
            '{"models": [1]}',
            "is no report on quality: it has no",
        ),
        ("model_repo.manifest.json", "{}", "model_repo.manifest.json cannot be read"),
        ("verification.json", "{}", "is of kind None"),
        ("results/nightly.json", "[" * 100_000, "cannot be read (it is nested too deeply)"),
    ],
)
def test_documents_that_are_damaged_are_refused_in_a_sentence(
    changed: PipelineConfig, tmp_path: Path, name: str, text: str, reason: str
) -> None:
    folder = tmp_path / "damaged"
    for document in DOCUMENTS:
        if (path := changed.artifacts.versions / "1" / document).exists():
            (folder / document).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / document)
    (folder / name).write_text(text)
    with pytest.raises(RepositoryError) as caught:
        read_documents(folder, "damaged")
    assert reason in str(caught.value)


def test_hostile_values_are_cut_and_rows_counted(changed: PipelineConfig, tmp_path: Path) -> None:
    folder = shutil.copytree(changed.artifacts.versions / "1", tmp_path / "hostile")
    path = folder / "attestations" / "provenance.json"
    statement = read(path)
    definition = statement["predicate"]["buildDefinition"]
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"a": deep}
    definition["externalParameters"]["config"] = {f"x{n}\n": "y" * 999 for n in range(999)} | deep
    path.write_text(json.dumps(statement))
    lines = run(changed, "1", str(folder)).splitlines()
    assert len(lines) == 202 and lines[-1].endswith(" more")
    assert max(len(line) for line in lines) < 400
