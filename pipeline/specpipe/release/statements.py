"""What is attested of a version: where it comes from, and what was proved and measured of it.

Each is a Statement of in-toto, version 1 (github.com/in-toto/attestation, spec/v1), about the files
of the repository; the first one is provenance as SLSA has it (slsa.dev/spec/v1.0/provenance). They
are not signed one by one: the signature of the version covers them.

Types are named by the package URL of this distribution, which is the one name that is its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from specpipe.build.lock import Lock
from specpipe.evaluate.nightly.record import Run
from specpipe.machine.libraries import DISTRIBUTION
from specpipe.machine.manifest import Files, Manifest
from specpipe.release.built import BuiltPair, Checkpoint
from specpipe.release.figures import acceptance_rates

STATEMENT = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
BUILDER = f"pkg:pypi/{DISTRIBUTION}"
BUILD, VERIFICATION, ACCEPTANCE, BENCH = (
    f"{BUILDER}#{kind}/v1" for kind in ("build", "verification", "acceptance", "bench")
)

_DIGEST = re.compile("sha256:([0-9a-f]{64})")

Statement = Mapping[str, Any]
Json = Mapping[str, Any]


def statement(subject: Files, predicate_type: str, predicate: Json) -> Statement:
    """Returns a statement about the files of a repository."""
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": f"model_repo/{name}", "digest": {"sha256": file.sha256}}
            for name, file in subject.items()
        ],
        "predicateType": predicate_type,
        "predicate": predicate,
    }


def provenance(built: BuiltPair, lock: tuple[Lock, str] | None = None) -> Statement:
    """Returns where a repository comes from: all that decided it, and what made it when.

    lock  what a lock beside the YAML says, and its digest
    """
    package = built.package
    argv = [str(word) for word in package.build.get("argv", ())]
    stages = {
        manifest.stage: {"settings": manifest.settings, "versions": manifest.versions}
        for manifest in built.manifests.values()
    }
    images = [] if lock is None else list(_images(built, lock[0]))
    predicate = {
        "buildDefinition": {
            "buildType": BUILD,
            "externalParameters": {
                "config": built.config.model_dump(mode="json"),
                "command": [Path(argv[0]).name, *argv[1:]] if argv else [],
            },
            "internalParameters": {
                "stages": stages,
                "python": package.build.get("python"),
                "platform": package.build.get("platform"),
                "gpus": list(package.build.get("gpus", ())),
            },
            "resolvedDependencies": [
                *(one for found in built.checkpoints.values() for one in _checkpoint(found)),
                *({"name": name, "digest": {"sha256": file.sha256}} for name, file in built.others),
                *(
                    {"name": name, "uri": library_url(name, version)}
                    for name, version in built.versions.items()
                ),
                *images,
            ],
        },
        "runDetails": {
            "builder": {"id": BUILDER, "version": {"specpipe": package.versions["specpipe"]}},
            "metadata": {
                "invocationId": f"{built.config.name}/{package.build.get('built_at')}",
                **_times(built.manifests),
            },
            "byproducts": []
            if lock is None
            else [{"name": "pair.lock", "digest": {"sha256": lock[1]}}],
        },
    }
    return statement(package.outputs, PROVENANCE, predicate)


def verification(subject: Files, proved: Json) -> Statement:
    """Returns what `specpipe verify` found: verdict, checks, ties, and under which conditions."""
    return statement(subject, VERIFICATION, _without(proved, "repository"))


def acceptance(subject: Files, proved: Json | None, night: Run | None) -> Statement | None:
    """Returns what of the drafted tokens was accepted, as counted while it was verified.

    The night's counts are those of greedy answers, prompt by prompt and by position.

    None where nothing was drafted, or nothing was looked at.
    """
    checks = [
        {name: check[name] for name in _COUNTED}
        for check in (proved or {}).get("checks", ())
        if check["kind"] == "speculation" and check["total_draft_tokens"]
    ]
    counted = None if night is None else night.acceptance
    if not checks and counted is None:
        return None
    predicate = {
        "conditions": _conditions(proved or {}),
        "checks": [
            {**c, "rate": c["total_accepted_draft_tokens"] / c["total_draft_tokens"]}
            for c in checks
        ],
        "greedy": None
        if counted is None
        else {
            **asdict(counted),
            "rates": {what: asdict(rate) for what, rate in acceptance_rates(night).items()},
        },
    }
    return statement(subject, ACCEPTANCE, predicate)


def bench(subject: Files, measured: Json) -> Statement:
    """Returns what speculation gained at each concurrency, with intervals and conditions."""
    predicate = {
        "conditions": {**_conditions(measured), "sides": measured["sides"]},
        "verdict": measured["verdict"],
        "loads": [
            {"concurrency": load["concurrency"], "comparison": load["comparison"]}
            for load in measured["loads"]
        ],
    }
    return statement(subject, BENCH, predicate)


_COUNTED = (
    "check",
    "side",
    "num_draft_tokens",
    "at_once",
    "total_draft_tokens",
    "total_accepted_draft_tokens",
)


def _conditions(result: Json) -> dict[str, Any]:
    names = ("made_at", "settings", "prompts", "machine", "versions")
    return {name: result[name] for name in names if name in result}


def _without(result: Json, *names: str) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in names}


def checkpoint_url(checkpoint: Checkpoint, file: str | None = None) -> str | None:
    """Returns the package URL of a hub's repository at its commit; None for a folder."""
    if checkpoint.commit is None:
        return None
    from packageurl import PackageURL

    owner, _, name = checkpoint.name.rpartition("/")
    return PackageURL(
        type="huggingface",
        namespace=owner or None,
        name=name,
        version=checkpoint.commit,
        subpath=file,
    ).to_string()


def library_url(name: str, version: str) -> str:
    """Returns the package URL of a distribution; specpipe's own has another name than it."""
    from packageurl import PackageURL

    return PackageURL(
        type="pypi", name=DISTRIBUTION if name == "specpipe" else name, version=version
    ).to_string()


def _checkpoint(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    """Yields a hub's commit, and the files that were read of it."""
    if checkpoint.commit is not None:
        yield {
            "name": checkpoint.role,
            "uri": checkpoint_url(checkpoint),
            "digest": {"gitCommit": checkpoint.commit},
        }
    for name, file in checkpoint.files.items():
        url = checkpoint_url(checkpoint, name)
        yield {
            "name": f"{checkpoint.role}/{name}",
            **({} if url is None else {"uri": url}),
            "digest": {"sha256": file.sha256},
        }


def _images(built: BuiltPair, lock: Lock) -> Iterator[dict[str, Any]]:
    """Yields the container images of tools that a lock has of stages with the same settings."""
    for manifest in built.manifests.values():
        locked = _below(_below(lock, "stages"), manifest.stage)
        digest = _DIGEST.fullmatch(str(_below(locked, "tool").get("image_digest")))
        image = manifest.settings.get("image")
        if image and digest and locked.get("settings") == manifest.settings:
            yield {"name": f"{manifest.stage}: {image}", "digest": {"sha256": digest[1]}}


def _below(values: Json, key: str) -> Json:
    """Returns a mapping that a lock has; an empty one where it has something else."""
    value = values.get(key)
    return value if isinstance(value, Mapping) else {}


def _times(manifests: Mapping[str, Manifest]) -> dict[str, str]:
    """Returns when the first stage began and the last one ended, in UTC."""
    ended = {
        datetime.fromisoformat(str(m.build["built_at"])): float(m.build["duration_s"])
        for m in manifests.values()
        if {"built_at", "duration_s"} <= m.build.keys()
    }
    if not ended:
        return {}
    began = min(end - timedelta(seconds=duration_s) for end, duration_s in ended.items())
    return {"startedOn": _utc(began), "finishedOn": _utc(max(ended))}


def _utc(moment: datetime) -> str:
    return moment.astimezone(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
