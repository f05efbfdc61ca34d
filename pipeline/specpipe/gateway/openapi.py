"""The bodies of requests in the description that `/openapi.json` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REFERENCE = "#/components/schemas/{model}"


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """Returns what a route says of its body, which it reads by itself."""
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Adds the models of bodies to the application's description."""

    def description() -> dict[str, Any]:
        if app.openapi_schema is None:
            _, found = models_json_schema(
                [(model, "validation") for model in models], ref_template=_REFERENCE
            )
            whole = get_openapi(title=app.title, version=app.version, routes=app.routes)
            whole.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
            app.openapi_schema = whole
        return app.openapi_schema

    app.openapi = description  # type: ignore[method-assign]
