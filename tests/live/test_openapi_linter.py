"""A linter of OpenAPI documents finds no fault in the server's document. The test fetches the
linter, an npm package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonpool.api.openapi import openapi_document
from website.http_page import reference_routes

HERE = Path(__file__).parent / "linter"
ABSENT = [tool for tool in ("node", "npm") if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.live,
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(ABSENT), reason=f"needs {', '.join(ABSENT)}"),
]


@pytest.fixture(scope="module")
def linter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder with the linter and its settings."""
    folder = tmp_path_factory.mktemp("linter")
    for name in ("redocly.yaml", "package.json"):
        shutil.copy(HERE / name, folder)
    line = ["npm", "install", "--no-fund", "--no-audit"]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


def rules_broken(linter: Path, document: dict[str, Any]) -> list[str]:
    """Returns the names of the rules that the document breaks, each with the place."""
    (linter / "openapi.json").write_text(json.dumps(document))
    line = ["node_modules/.bin/redocly", "lint", "openapi.json", "--format=json"]
    quiet = os.environ | {"REDOCLY_TELEMETRY": "off", "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true"}
    done = subprocess.run(line, cwd=linter, capture_output=True, text=True, timeout=300, env=quiet)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    found = [f"{p['ruleId']} {p['location'][0]['pointer']}" for p in report["problems"]]
    assert bool(found) == bool(done.returncode), done.stderr
    return found


def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(openapi_document(reference_routes()))
    return found


def test_the_document_breaks_no_rule(linter: Path) -> None:
    assert rules_broken(linter, document()) == []


def forget_servers(document: dict[str, Any]) -> None:
    del document["servers"]


def refer_to_nothing(document: dict[str, Any]) -> None:
    body = document["paths"]["/tokenize"]["post"]["requestBody"]["content"]["application/json"]
    body["schema"] = {"$ref": "#/components/schemas/NoSuchBody"}


def forget_a_summary(document: dict[str, Any]) -> None:
    del document["paths"]["/health"]["get"]["summary"]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (forget_servers, "no-empty-servers"),
        (refer_to_nothing, "no-unresolved-refs"),
        (forget_a_summary, "operation-summary"),
    ],
)
def test_a_broken_rule_is_found(
    linter: Path, change: Callable[[dict[str, Any]], None], rule: str
) -> None:
    changed = document()
    change(changed)
    assert any(line.startswith(f"{rule} ") for line in rules_broken(linter, changed))
