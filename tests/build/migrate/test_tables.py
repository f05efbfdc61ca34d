"""The tables of the servers name settings that are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from specpipe.build.migrate.flags import METHOD, NUM_VERIFIED, Flag, Put
from specpipe.build.migrate.other_server import PROGRAMS
from specpipe.build.migrate.server import Server
from specpipe.config.sections import PipelineConfig

SERVERS = {server.name: server for server in PROGRAMS.values()}


def all_flags(flags: Iterable[Flag]) -> Iterator[Flag]:
    for flag in flags:
        yield flag
        yield from all_flags(flag.keys)


def settings(schema: dict[str, Any], part: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, found in part.get("properties", {}).items():
        yield prefix + name
        kinds = found.get("anyOf", []) + found.get("oneOf", []) + found.get("allOf", []) + [found]
        for kind in kinds:
            if "$ref" in kind:
                inside = schema["$defs"][kind["$ref"].rpartition("/")[2]]
                yield from settings(schema, inside, f"{prefix}{name}.")


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS.keys())
def test_what_a_flag_becomes_is_a_setting(server: Server) -> None:
    schema = PipelineConfig.model_json_schema()
    known = {METHOD, NUM_VERIFIED, *settings(schema, schema)}
    for flag in all_flags((*server.flags, *server.file_keys)):
        meant = [one.setting for one in flag.values.values() if isinstance(one, Put)]
        for setting in (flag.setting, *meant):
            assert setting in known or setting == "", flag.names


@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS.keys())
def test_a_name_means_one_flag_which_is_carried_or_says_why_not(server: Server) -> None:
    for table in (server.flags, server.file_keys):
        names = [name for flag in table for name in flag.names]
        assert len(names) == len(set(names))
    for flag in all_flags((*server.flags, *server.file_keys)):
        is_told = flag.setting or flag.note or flag.keys or flag.values
        assert is_told or server.file_flag in flag.names, flag.names
