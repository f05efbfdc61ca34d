#!/usr/bin/env python3
"""Writes pages of docs/reference/ from what the code itself declares.

With --check it writes nothing, and fails where a page is not what it would write.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from pydantic.fields import FieldInfo

from specpipe.cli.group import main as cli
from specpipe.config.sections import json_schema
from specpipe.gateway.chat_schema import ChatRequest
from specpipe.gateway.completion_schema import CompletionRequest
from specpipe.gateway.parameters import Refused, effect_of
from specpipe.runtimes.runtime import RUNTIMES
from specpipe.triton.serving.tensors import ENSEMBLE_INPUTS, ENSEMBLE_OUTPUTS, TensorSpec

FOLDER = Path(__file__).parents[1] / "docs" / "reference"

Schema = Mapping[str, Any]
Setting = tuple[str, Schema]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A Markdown table, and an empty line after it; ValueError where a cell says nothing."""
    for cells in (head, ["---"] * len(head), *rows):
        if not all(cells):
            raise ValueError(f"{cells[0]} has no description")
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


# Settings.


def settings(schema: Schema, section: Schema, path: str = "") -> Iterator[Setting]:
    """Each setting below a section by its whole name, sections themselves left out."""
    for name, found in section["properties"].items():
        inner = _section(schema, found)
        if inner is None:
            yield f"{path}{name}", found
        elif "oneOf" not in inner:
            yield from settings(schema, inner, f"{path}{name}.")


def _section(schema: Schema, setting: Schema) -> Schema | None:
    """The section that a setting is, as most of them are optional ones; None for a value."""
    if "oneOf" in setting:
        return setting
    choices = [setting, *setting.get("anyOf", ()), *setting.get("allOf", ())]
    named = [choice["$ref"] for choice in choices if "$ref" in choice]
    return _by_reference(schema, named[0]) if named else None


def _by_reference(schema: Schema, reference: str) -> Schema:
    section: Schema = schema["$defs"][reference.rpartition("/")[2]]
    return section


def type_of(schema: Schema, setting: Schema) -> str:
    """What a value may be, in words."""
    if "enum" in setting:
        return ", ".join(f"`{value}`" for value in setting["enum"])
    if "const" in setting:
        return f"`{setting['const']}`"
    if "anyOf" in setting:
        kinds = [type_of(schema, choice) for choice in setting["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if setting.get("type") == "array":
        return f"list of {type_of(schema, setting['items'])}"
    if "$ref" in setting:
        return " and ".join(
            f"`{name}`" for name in _by_reference(schema, setting["$ref"])["properties"]
        )
    bounds = [
        f"{sign} {setting[key]:,}"
        for key, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        if key in setting
    ]
    kind = {"string": "text", "path": "path"}.get(
        setting.get("format", setting.get("type", "any")), setting.get("type", "any")
    )
    return " ".join([kind, " and ".join(bounds)]).strip()


def default_of(setting: Schema) -> str:
    """The value that holds where the YAML says nothing."""
    if "default" not in setting:
        return "required"
    default = setting["default"]
    return "none" if default is None else f"`{json.dumps(default)}`"


def settings_page() -> Iterator[str]:
    schema = json_schema()
    yield "# Settings"
    yield ""
    yield "Every setting of a YAML; `specpipe schema` prints them as JSON Schema, for an editor."
    yield "Each is there since 0.1.0 unless it says otherwise."
    yield ""

    def rows(chosen: Iterable[Setting]) -> Iterator[list[str]]:
        for name, found in chosen:
            about = " ".join(found.get("description", "").split())
            since = f" Since {found['since']}." if "since" in found else ""
            yield [f"`{name}`", type_of(schema, found), default_of(found), about + since]

    head = ("setting", "value", "default", "what it is")
    whole = [(n, s) for n, s in settings(schema, schema) if not n.startswith(("draft.", "target."))]
    checkpoint = _by_reference(schema, "CheckpointConfig")
    titles: dict[str, list[Setting]] = {"The pair": []}
    for name, found in whole:
        first, dot, _ = name.partition(".")
        titles.setdefault(f"`{first}`" if dot else "The pair", []).append((name, found))
    yield "## The pair"
    yield ""
    yield from table(head, rows(titles.pop("The pair")))
    yield "## `draft` and `target`"
    yield ""
    yield "Both have these settings; in a YAML each stands below `draft` or `target`."
    yield ""
    yield from table(head, rows(settings(schema, checkpoint)))
    yield from _engine(schema, head, rows)
    for title, chosen in titles.items():
        yield f"## {title}"
        yield ""
        yield from table(head, rows(chosen))


def _engine(
    schema: Schema,
    head: Sequence[str],
    rows: Callable[[Iterable[Setting]], Iterator[list[str]]],
) -> Iterator[str]:
    """The section that depends on the runtime: what all have, then what each has of its own."""
    mapping = schema["properties"]["engine"]["discriminator"]["mapping"]
    own = {
        runtime: dict(settings(schema, _by_reference(schema, mapping[runtime]), "engine."))
        for runtime in RUNTIMES
    }
    first, *others = own.values()
    shared = {
        name: found for name, found in first.items() if all(found == o.get(name) for o in others)
    }
    yield "## `engine`"
    yield ""
    yield "Of every runtime:"
    yield ""
    yield from table(head, rows(shared.items()))
    for runtime, found in own.items():
        yield f"### `engine.runtime: {runtime}`"
        yield ""
        yield from table(head, rows((n, s) for n, s in found.items() if n not in shared))


# Commands.

_RELEASE = (
    "diff",
    "keys",
    "promote",
    "publish",
    "rollback",
    "sign",
    "verify-signature",
    "versions",
)

_DRAFT = "draft"


def commands_page() -> Iterator[str]:
    yield "# Commands"
    yield ""
    yield "As `specpipe COMMAND --help` has them. Exit codes: [here](exit-codes.md). Those that"
    yield "publish and promote have [a page of their own](release-commands.md), and so has"
    yield "[`draft`](draft-commands.md)."
    yield ""
    context = click.Context(cli, info_name="specpipe")
    yield from _options(cli, context)
    for name, command in sorted(cli.commands.items()):
        if name not in (*_RELEASE, _DRAFT):
            yield from _command(name, command, context, "##")


def release_commands_page() -> Iterator[str]:
    yield "# Commands of releases"
    yield ""
    yield "As `specpipe COMMAND --help` has them: from a built pair to one served elsewhere."
    yield ""
    context = click.Context(cli, info_name="specpipe")
    for name, command in sorted(cli.commands.items()):
        if name in _RELEASE:
            yield from _command(name, command, context, "##")


def draft_commands_page() -> Iterator[str]:
    yield "# Commands for drafts"
    yield ""
    yield "As `specpipe draft COMMAND --help` has them; what they are for: [Drafts](../draft.md)."
    yield ""
    yield from _command(
        _DRAFT, cli.commands[_DRAFT], click.Context(cli, info_name="specpipe"), "##"
    )


def _command(name: str, command: click.Command, above: click.Context, mark: str) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=above)
    yield f"{mark} `{context.command_path}`"
    yield ""
    yield f"`{context.command_path} {' '.join(command.collect_usage_pieces(context))}`"
    yield ""
    yield from inspect.cleandoc(command.help or "").splitlines()
    yield ""
    if not isinstance(command, click.Group) or command.invoke_without_command:
        yield from _options(command, context)
    if isinstance(command, click.Group):
        for inner, found in sorted(command.commands.items()):
            yield from _command(inner, found, context, f"{mark}#")


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    records = [
        (param, param.get_help_record(context))
        for param in command.get_params(context)
        if isinstance(param, click.Option)
    ]
    rows = [[f"`{record[0]}`", record[1]] for _, record in records if record is not None]
    yield from table(("option", "what it does"), rows)


# Inputs and outputs.


def ensemble_page() -> Iterator[str]:
    yield "# Inputs and outputs of the ensemble"
    yield ""
    yield "[Serve](../serving.md#inputs-and-outputs) says how they go together."
    yield ""
    head = ("name", "type", "shape", "what it is")

    def rows(tensors: Iterable[TensorSpec]) -> Iterator[list[str]]:
        for tensor in tensors:
            shape = "[" + ", ".join("any" if n < 0 else str(n) for n in tensor.dims) + "]"
            yield [f"`{tensor.name}`", tensor.dtype, shape, tensor.meaning]

    yield "## Inputs"
    yield ""
    yield from table(head, rows(t for t in ENSEMBLE_INPUTS if t.neutral is None))
    yield "## Inputs that ask for what is not supported"
    yield ""
    yield "Their neutral value passes; any other is refused by name."
    yield ""
    yield from table(
        ("name", "type", "neutral value"),
        (
            [
                f"`{t.name}`",
                t.dtype,
                " or ".join(f"`{json.dumps(v)}`" for v in t.neutral) or "empty",
            ]
            for t in ENSEMBLE_INPUTS
            if t.neutral is not None
        ),
    )
    yield "## Outputs"
    yield ""
    yield from table(head, rows(ENSEMBLE_OUTPUTS))


# The front door's parameters.


_BODIES = {"chat": ChatRequest, "completions": CompletionRequest}


def openai_page() -> Iterator[str]:
    yield "# Parameters of the front door"
    yield ""
    yield "Of [`/v1/chat/completions` and `/v1/completions`](../openai.md). `null` always passes,"
    yield "and so does the value of a refused field that asks for nothing. A field that is in no"
    yield "table is refused by name; with `--lenient` it is logged and left out."
    yield ""
    for effect, head in (
        ("honoured", ("field", "of", "value", "what it is")),
        ("accepted without effect", ("field", "of", "value")),
        ("refused", ("field", "of", "what passes all the same")),
    ):
        yield f"## {effect.capitalize()}"
        yield ""
        yield from table(head, _parameters(effect))


def _parameters(effect: str) -> Iterator[list[str]]:
    """The fields of that effect; one of both bodies stands in one row where it is the same."""
    for name in dict.fromkeys(name for body in _BODIES.values() for name in body.model_fields):
        cells: dict[tuple[str, ...], list[str]] = {}
        for kind, body in _BODIES.items():
            field = body.model_fields.get(name)
            if field is not None and effect_of(field) == effect:
                schema = body.model_json_schema()["properties"][name]
                cells.setdefault(_cells(field, schema), []).append(kind)
        for found, kinds in cells.items():
            yield [f"`{name}`", "both" if len(kinds) == 2 else kinds[0], *found]


def _cells(field: FieldInfo, schema: Schema) -> tuple[str, ...]:
    if effect_of(field) == "refused":
        mark = next(mark for mark in field.metadata if isinstance(mark, Refused))
        return (" or ".join(f"`{json.dumps(value)}`" for value in (None, *mark.neutral)),)
    if effect_of(field) == "honoured":
        return _value_of(schema), " ".join((field.description or "").split())
    return (_value_of(schema),)


def _value_of(schema: Schema) -> str:
    """What a field's value may be, in words."""
    choices = [c for c in schema.get("anyOf", [schema]) if c.get("type") != "null"]
    return " or ".join(dict.fromkeys(_kind_of(choice) for choice in choices))


def _kind_of(schema: Schema) -> str:
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "$ref" in schema or schema.get("type") == "object":
        return "object"
    if schema.get("type") == "array":
        return f"list of {_value_of(schema['items'])}"
    return type_of({}, schema)


PAGES = {
    "openai": openai_page,
    "settings": settings_page,
    "commands": commands_page,
    "release-commands": release_commands_page,
    "draft-commands": draft_commands_page,
    "ensemble": ensemble_page,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say which page is stale")
    check = parser.parse_args().check
    stale = []
    for name, page in PAGES.items():
        path = FOLDER / f"{name}.md"
        text = "\n".join(page()).rstrip() + "\n"
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if not check:
            path.write_text(text, encoding="utf-8")
    for path in stale if check else ():
        print(f"{path} is stale: run `python scripts/reference.py`", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
