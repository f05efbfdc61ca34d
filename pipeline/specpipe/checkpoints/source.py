"""Where a checkpoint comes from: a folder, or a repository of the Hugging Face hub.

Only configs, tokenizer files, licences and safetensors are fetched; pickles and code stay where
they are. The hub's own settings hold: its cache, its token, and `HF_HUB_OFFLINE` for no network at
all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpipe.checkpoints.checkpoint import weights_among
from specpipe.checkpoints.files import TEMPLATES_NAME
from specpipe.checkpoints.licences import LICENCE_NAMES, MODEL_CARD
from specpipe.errors import CheckpointError, ConfigError, RuntimeUnavailable, show, to_sentence
from specpipe.machine.libraries import with_library
from specpipe.progress import Count, count, phase
from specpipe.roles import Role

_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
_LICENCES = [f"{name}*" for name in LICENCE_NAMES] + [MODEL_CARD]
_WEIGHTS = ["*.safetensors"]
_COPIES = ["*/*", "consolidated*"]  # other formats of the same weights, and their configs
_HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_MAX_HUB_ID = 96  # huggingface_hub's validate_repo_id
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Source:
    """A checkpoint on this machine.

    revision  the commit of a hub repository, None for a folder
    name      what the config calls it
    """

    path: Path
    revision: str | None
    name: str


def resolve(
    checkpoint: str,
    *,
    revision: str | None,
    base: Path,
    role: Role,
    weights: bool = True,
    small_files: Path | None = None,
) -> Source:
    """Finds a checkpoint: a folder, relative to `base`, or else a hub repository.

    A folder wins over a repository of the same name. Without `weights` only the small files of a
    repository are fetched, which is all that the pair check reads. With `small_files` no hub is
    asked: that folder holds the small files of `org/name` in `org--name/` or `org/name/`.
    """
    if not checkpoint:
        raise ConfigError(f"{role}.checkpoint is empty; give a folder or a hub id")
    try:
        folder = (base / Path(checkpoint).expanduser()).resolve()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError) as exc:  # a name too long, a loop of links, no such home
        reason = exc.strerror if isinstance(exc, OSError) else show(exc)
        raise ConfigError(
            f"{role}.checkpoint {show(checkpoint)} cannot be looked up: {reason}"
        ) from exc
    if is_folder:
        if revision is not None:
            raise ConfigError(
                f"{role}.revision is '{show(revision)}', but {role}.checkpoint is the folder "
                f"{folder}; "
                "a revision needs a hub id"
            )
        return Source(folder, None, checkpoint)
    if exists:
        raise ConfigError(
            f"{role}.checkpoint {folder} is a file; give the folder that holds config.json"
        )
    if not _HUB_ID.fullmatch(checkpoint) or len(checkpoint) > _MAX_HUB_ID:
        raise ConfigError(
            f"{role}.checkpoint {show(checkpoint)}: there is no folder {to_sentence(str(folder))}"
        )
    if small_files is not None:
        return Source(_local_copy(checkpoint, small_files, role), None, checkpoint)
    path = _fetch(checkpoint, revision, folder, role, weights)
    return Source(path, path.name if _COMMIT.fullmatch(path.name) else None, checkpoint)


def _local_copy(repo_id: str, small_files: Path, role: Role) -> Path:
    flat = small_files / repo_id.replace("/", "--")
    for folder in (flat, small_files / repo_id):
        if folder.is_dir():
            return folder.resolve()
    raise CheckpointError(
        f"{role}: the small files of {repo_id} are not in {small_files}: put config.json, "
        f"generation_config.json and the tokenizer's files into {flat}"
    )


def _fetch(repo_id: str, revision: str | None, folder: Path, role: Role, weights: bool) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as exc:
        raise RuntimeUnavailable(
            f"{role}.checkpoint {repo_id} is no folder ({folder}), and fetching it needs "
            f"'huggingface_hub': {with_library('huggingface_hub')}"
        ) from exc
    at = f"{repo_id} at revision {show(revision)}" if revision else repo_id
    try:
        with phase(f"{role}: fetching {repo_id}"), count(None, "bytes") as fetched:
            snapshot = snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=_SMALL_FILES + _LICENCES + (_WEIGHTS if weights else []),
                ignore_patterns=_COPIES,
                tqdm_class=_counting(fetched),
            )
            if (Path(snapshot) / "chat_template.jinja").exists():  # others come beside it alone
                snapshot = snapshot_download(
                    repo_id,
                    revision=Path(snapshot).name,
                    allow_patterns=[f"{TEMPLATES_NAME}/*.jinja"],
                    tqdm_class=_counting(fetched),
                )
            return Path(snapshot)
    except errors.GatedRepoError as exc:
        raise CheckpointError(
            f"{role}: {repo_id} is gated; accept its terms on the hub, then `hf auth login`"
        ) from exc
    except errors.RepositoryNotFoundError as exc:
        raise CheckpointError(
            f"{role}.checkpoint {repo_id} is neither a folder ({folder}) nor a hub repository "
            "that you can read; check the name, or `hf auth login` if it is private"
        ) from exc
    except errors.RevisionNotFoundError as exc:
        raise CheckpointError(
            f"{role}: {repo_id} has no revision {show(revision)}; check {role}.revision"
        ) from exc
    except errors.LocalEntryNotFoundError as exc:
        raise CheckpointError(
            f"{role}.checkpoint {repo_id} is no folder ({folder}), {at} is not complete in the "
            "local cache, and the hub is out of reach or switched off (HF_HUB_OFFLINE); "
            f"connect, or fetch it elsewhere with `hf download {repo_id}`"
        ) from exc
    except Exception as exc:  # of the hub's HTTP library too, which changes with its version
        raise CheckpointError(f"{role}: {at} cannot be fetched from the hub: {exc}") from exc


def weight_digests(repo_id: str, commit: str) -> dict[str, str] | None:
    """Returns the SHA-256 of each file of weights that is read of a repository, as the hub has it.

    Nothing is fetched: the digest of a large file is its name in Git LFS (huggingface_hub 2.4,
    hf_api.py, `RepoFile.lfs`). None where the hub does not tell all of them, or is out of reach.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    try:
        tree = HfApi().list_repo_tree(repo_id, revision=commit)
        files = {one.path: one for one in tree if isinstance(one, RepoFile)}
    except Exception:  # of the hub's HTTP library too; fetching says what is wrong
        return None
    names = filter_repo_objects(files, allow_patterns=_WEIGHTS, ignore_patterns=_COPIES)
    told = {name: files[name].lfs for name in weights_among(names)}
    digests = {name: lfs.sha256 for name, lfs in told.items() if lfs is not None}
    return digests if told and len(digests) == len(told) else None


def _counting(fetched: Count) -> type:
    """Returns what huggingface_hub is to draw bars with: it draws none, and counts bytes.

    Version 2.4 has a bar for bytes that come from the network, one for those that are written,
    which are counted here, and one for files (_snapshot_download.py). Totals grow as files begin.
    """
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            is_network = str(kwargs.get("desc", "")).startswith("Downloading bytes")
            self._counts = kwargs.get("unit") == "B" and not is_network
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def refresh(self, *args: Any, **kwargs: Any) -> None:
            if self._counts and self.total:
                fetched.expect(int(self.total))

        def update(self, n: float | None = 1) -> None:
            if self._counts:
                fetched.advance(int(n or 0))

    return Bar
