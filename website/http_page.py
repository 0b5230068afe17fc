"""The page of the HTTP API, from its OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

from starlette.routing import BaseRoute

from moonpool.api.app import make_app
from moonpool.api.serving_backend import ServingBackend

HEAD = """# HTTP API

Every route, from the document that a server sends at `/openapi.json`
([openapi.json](openapi.json)). [Serving](serving.md#what-a-request-may-ask-for) says what the
fields do. A route that answers with `text/event-stream` sends server-sent events. An error has the
shape of `Error` below.
"""


def reference_routes() -> Sequence[BaseRoute]:
    """Returns the routes of a server. The handlers of these routes have no head, so they cannot be
    called."""
    return make_app(cast(ServingBackend, SimpleNamespace(models=list))).routes


def http_page(document: bytes) -> str:
    """Returns the page as Markdown: a table of routes, then the fields of each body."""
    api = json.loads(document)
    rows = ["| route | what it does | answers with |", "| --- | --- | --- |"]
    rows += [
        _row(path, name, each) for path, all_ in api["paths"].items() for name, each in all_.items()
    ]
    bodies = [_body(name, schema) for name, schema in api["components"]["schemas"].items()]
    return "\n".join([HEAD, "## Routes", "", *rows, "", *bodies])


def _row(path: str, method: str, operation: dict[str, Any]) -> str:
    success = min(operation["responses"])  # the only one below 400
    kinds = ", ".join(f"`{kind}`" for kind in operation["responses"][success]["content"])
    body = operation.get("requestBody")
    taken = f" Body: {_type(body['content']['application/json']['schema'])}." if body else ""
    return f"| `{method.upper()} {path}` | {operation['summary']}{taken} | {kinds} |"


def _body(name: str, schema: dict[str, Any]) -> str:
    lines = [f"## {name}", ""]
    if schema.get("properties"):
        lines += ["| field | type | default |", "| --- | --- | --- |", *_fields(schema)]
    else:
        lines += [_type(schema)]
    return "\n".join([*lines, ""])


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    required = schema.get("required", [])
    for field, own in schema["properties"].items():
        default = "required" if field in required else _default(own)
        yield f"| `{field}` | {_type(own)} | {default} |"


def _default(schema: dict[str, Any]) -> str:
    return f"`{json.dumps(schema['default'])}`" if "default" in schema else "-"


def _type(schema: dict[str, Any]) -> str:
    """Returns a schema in words; a named one links to its section."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(each)}`" for each in schema["enum"])
    kinds = schema.get("type", "any")
    if kinds == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)
