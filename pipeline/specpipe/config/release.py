"""The section `release` of the YAML: where versions go, whom to trust, what is kept loaded."""

from __future__ import annotations

from pydantic import Field, model_validator

from specpipe.config import messages
from specpipe.section import Section


class ReleaseConfig(Section):
    """Where versions of the pair are published, and whose signatures are trusted."""

    store: str | None = Field(default=None, min_length=1)
    """Where versions are published and fetched: a folder, relative to this file, or a URL:
    `s3://bucket/path`, `gs://bucket/path`, `ssh://user@host/path`, `oci://host/name`; none:
    nowhere, unless a command says so. Credentials come from the environment."""

    cache: str | None = Field(default=None, min_length=1)
    """A store, named as the one of versions, that keeps the artifacts of stages, so that what one
    machine built another one fetches; none: no such cache."""

    trust: str | None = Field(default=None, min_length=1)
    """The file of the publishers whose signatures are trusted, relative to this one; none: nobody
    is trusted."""

    require_signature: bool = False
    """Whether only what a trusted publisher signed is served and promoted."""

    keep_previous: bool = True
    """Whether the version before the promoted one stays loaded, so that a rollback takes seconds;
    it takes the memory of a second pair."""

    @model_validator(mode="after")
    def _check_trust(self) -> ReleaseConfig:
        if self.require_signature and self.trust is None:
            raise messages.broken_rule(
                "release.require_signature",
                self.require_signature,
                "false, as there is no release.trust",
            )
        return self
