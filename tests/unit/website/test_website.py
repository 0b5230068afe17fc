"""The documentation site: its pages are whole, its links lead on, nothing comes from elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import venv
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from moonpool.api.openapi import openapi_document
from moonpool.cli.main import cli
from moonpool.config.parse import parse_config
from moonpool.config.schema import schema_of
from moonpool.config.tables import Config
from website.__main__ import main
from website.command_page import command_page
from website.http_page import http_page, reference_routes
from website.pages import linked_files, search_rank, turn_links

ROOT = Path(__file__).resolve().parents[3]
LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "decisions").mkdir(parents=True)
    for name in ("SECURITY.md", "README.md", "docs/a.md", "docs/decisions/README.md"):
        (tmp_path / name).write_text("")
    (tmp_path / "results").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("page", "link", "turned"),
    [
        ("docs/a.md", "[x](../SECURITY.md#top)", "[x](SECURITY.md#top)"),
        ("docs/decisions/README.md", "[x](../a.md)", "[x](../a.md)"),
        ("docs/decisions/README.md", "[x](../../SECURITY.md)", "[x](../SECURITY.md)"),
        ("SECURITY.md", "[x](docs/a.md)", "[x](a.md)"),
        ("SECURITY.md", "[x](docs/decisions)", "[x](decisions/README.md)"),
        ("docs/a.md", "[x](../README.md)", "[x](index.md)"),
        ("docs/a.md", "[x](../results)", "x"),
        ("docs/a.md", "[x](https://example.org/a.md)", "[x](https://example.org/a.md)"),
        ("docs/a.md", "[x](#part)", "[x](#part)"),
        ("docs/a.md", "```sh\n[x](nowhere.md)\n```", "```sh\n[x](nowhere.md)\n```"),
    ],
)
def test_links_keep_their_targets(checkout: Path, page: str, link: str, turned: str) -> None:
    assert turn_links(checkout, checkout / page, link) == turned


def test_linked_files_come_along_and_a_link_to_nothing_is_an_error(checkout: Path) -> None:
    page = checkout / "docs" / "a.md"
    found = list(linked_files(checkout, page, "[x](../SECURITY.md) [y](#z) ![i](decisions)"))
    assert found == [checkout / "SECURITY.md", checkout / "docs" / "decisions" / "README.md"]
    with pytest.raises(FileNotFoundError, match=r"nowhere\.md"):
        list(linked_files(checkout, page, "[x](nowhere.md)"))


def test_the_history_of_the_project_ranks_below_the_guides() -> None:
    for page in (
        "CHANGELOG.md",
        "docs/decisions/attempts-and-faults.md",
        "docs/decisions/README.md",
    ):
        head = yaml.safe_load(search_rank(ROOT, ROOT / page).strip("-\n"))
        assert isinstance(head["search"]["boost"], float) and head["search"]["boost"] < 0.0001
    for page in ("README.md", "SECURITY.md", "docs/serving.md"):
        assert search_rank(ROOT, ROOT / page) == ""


def test_the_page_of_commands_has_every_command_and_flag() -> None:
    page = command_page()
    for name in cli.list_commands(click.Context(cli)):
        assert f"\n## moonpool {name}\n" in page
    for part in ("## moonpool config check", "--kvcache-balancing-threshold", "--drain-seconds"):
        assert part in page
    assert "head-process" not in page


def test_the_page_of_http_has_every_route_and_links_to_every_body() -> None:
    document = openapi_document(reference_routes())
    page = http_page(document)
    paths = json.loads(document)["paths"]
    assert len(paths) > 20
    for path, operations in paths.items():
        for method in operations:
            assert f"`{method.upper()} {path}`" in page
    sections = {name.lower() for name in re.findall(r"^## (\w+)$", page, re.M)}
    assert set(re.findall(r"\]\(#(\w+)\)", page)) <= sections


def test_every_key_in_the_page_on_tuning_exists_and_takes_the_value() -> None:
    text = (ROOT / "docs" / "tuning.md").read_text()
    found = re.findall(r"`([a-z]+)\.([a-z_]+)(?: = ([^`]+))?`", text)
    assert len(found) > 25
    keys = schema_of(Config)
    for table, key, value in found:
        assert f"{table}.{key}" in keys
        if value:
            parse_config(f"[{table}]\n{key} = {value}\n")


def _mkdocs(folder: Path) -> Path:
    """Returns MkDocs as locked: that of `make docs`, or one installed into `folder`."""
    lock = ROOT / "requirements-docs.lock"
    installed = ROOT / ".venv-docs" / ".installed"
    if installed.exists() and installed.stat().st_mtime >= lock.stat().st_mtime:
        return installed.parent / "bin" / "mkdocs"
    venv.create(folder, with_pip=True)
    line = [str(folder / "bin" / "pip"), "install", "-q", "--require-hashes", "-r"]
    line.append(str(lock))
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        pytest.skip(f"the packages of the site cannot be installed here: {done.stderr[-300:]}")
    return folder / "bin" / "mkdocs"


@pytest.mark.long
def test_the_site_is_built_with_all_links_and_without_foreign_parts(tmp_path: Path) -> None:
    mkdocs = _mkdocs(tmp_path / "venv")
    source = tmp_path / "source"
    written = CliRunner().invoke(main, [str(source)])
    assert written.exit_code == 0, written.output
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"INHERIT: {ROOT}/mkdocs.yml\ndocs_dir: source\nsite_dir: site\n")
    line = [str(mkdocs), "build", "--strict", "-f", str(config)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        assert not LOADED.search(page.read_text()), page
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())["docs"]
    history = [each for each in index if each["location"].startswith(("decisions/", "CHANGELOG"))]
    guides = [each for each in index if each["location"].startswith(("serving", "models"))]
    assert len(history) > 100 and all(each["boost"] < 0.0001 for each in history)
    assert len(guides) > 10 and not any("boost" in each for each in guides)
    with (source / "tuning.md").open("a") as page_file:
        page_file.write("\n[x](serving.md#no-such-part)\n")
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "no-such-part" in done.stderr
