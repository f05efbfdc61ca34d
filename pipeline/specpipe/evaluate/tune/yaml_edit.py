"""Writes a schedule into the YAML of a pair; every other line, comments too, stays as it is."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

from pydantic import ValidationError

from specpipe.build.load import validate
from specpipe.config.document import read_yaml
from specpipe.config.rewriting import rewritten, to_lines
from specpipe.config.sections import PipelineConfig
from specpipe.errors import ConfigError
from specpipe.evaluate.tune.schedule import to_settings
from specpipe.machine.whole_file import written_whole
from specpipe.speculative.adaptive import Schedule


def write_schedule(path: Path, schedule: Schedule) -> None:
    """Sets speculation.schedule, and raises speculation.num_draft_tokens where it allows less.

    Raises ConfigError, with what to write by hand, where the text of the YAML does not allow it.
    """
    data = copy.deepcopy(read_yaml(path).data)  # refuses what is not a YAML of ours
    section = data["speculation"] = data.get("speculation") or {}
    most = max(length for _, length in schedule)
    default = PipelineConfig.model_fields["speculation"].default.num_draft_tokens
    if section.get("num_draft_tokens", default) < most:
        section["num_draft_tokens"] = most
    section |= to_settings(schedule)
    try:
        text = rewritten(path.read_bytes().decode(), data, origin=str(path))
        validate(data, path)
    except (ConfigError, ValidationError) as exc:
        by_hand = to_lines({"speculation": to_settings(schedule)})
        raise ConfigError(
            f"{path}: the schedule cannot be put into section speculation as it is written there; "
            f"write it by hand:\n{by_hand}"
        ) from exc
    try:
        with written_whole(path) as staged:
            staged.write_text(text, encoding="utf-8", newline="")
            shutil.copymode(path, staged)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc
