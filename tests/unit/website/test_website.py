"""Tests the documentation site: its pages are complete, its links exist, and no file comes from
another site."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from moonpool.api.openapi import openapi_document
from moonpool.cli.main import cli
from moonpool.config.parse import parse_config
from moonpool.config.schema import schema_of
from moonpool.config.tables import Config
from tests.unit.website.built_site import write_sources
from website.command_page import command_page
from website.http_page import http_page, reference_routes
from website.look import style_sheet
from website.notebook_page import notebook_page
from website.pages import linked_files, turn_links
from website.search_rank import WORDS, page_head, rank_of
from website.versions import publish

ROOT = Path(__file__).resolve().parents[3]
LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "decisions").mkdir(parents=True)
    for name in (
        "SECURITY.md",
        "README.md",
        "docs/a.md",
        "docs/decisions/README.md",
        "docs/n.ipynb",
    ):
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
        ("docs/decisions/README.md", "[x](../n.ipynb)", "[x](../n.md)"),
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


def test_guides_rank_before_references_evidence_and_history() -> None:
    for better, worse in (
        ("serving.md", "commands.md"),
        ("commands.md", "benchmarks.md"),
        ("benchmarks/results/README.md", "CHANGELOG.md"),
        ("src/moonpool/cost/README.md", "decisions/attempts-and-faults.md"),
    ):
        assert rank_of(better) > 10 * rank_of(worse)
        head = yaml.safe_load(page_head(worse).strip("-\n"))
        assert head["search"]["boost"] == rank_of(worse)


def test_words_of_the_search_belong_to_pages_that_exist() -> None:
    for page in WORDS:
        assert (ROOT / "docs" / page).is_file()
        assert yaml.safe_load(page_head(page).strip("-\n"))["tags"] == list(WORDS[page])


def test_the_site_has_both_sets_of_colours_of_the_pages() -> None:
    sheet = style_sheet()
    own = (ROOT / "src" / "moonpool" / "pages" / "look.css").read_text()
    for colour in re.findall(r"--c1: (#\w+)", own):
        assert f"--c1: {colour}" in sheet
    used = set(re.findall(r"var\((--\w+)\)", sheet))
    for scheme in ("default", "slate"):
        (block,) = re.findall(rf'"{scheme}"\] \{{ (--bg[^}}]*)', sheet)
        assert used <= set(re.findall(r"(--\w+):", block))


def test_versions_stand_beside_each_other_and_the_newest_release_is_first(tmp_path: Path) -> None:
    site, folder = tmp_path / "site", tmp_path / "versions"
    with pytest.raises(FileNotFoundError, match="build the site first"):
        publish(site, folder, "0.1.0")
    site.mkdir()
    for version in ("0.9.0", "0.10.0", "0.11.0.dev1", "0.9.0"):
        (site / "index.html").write_text(version)
        found = publish(site, folder, version)
    assert found == ["0.11.0.dev1", "0.10.0", "0.9.0"]
    entries = json.loads((folder / "versions.json").read_text())
    assert [entry["version"] for entry in entries] == found
    assert [entry["aliases"] for entry in entries] == [[], ["latest"], []]
    assert "url=0.10.0/index.html" in (folder / "index.html").read_text()
    assert (folder / "0.9.0" / "index.html").read_text() == "0.9.0"


def test_every_page_of_docs_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    for page in (ROOT / "docs").glob("*.md"):
        assert f" {page.name}\n" in navigation, page.name


def test_a_notebook_is_a_page_with_what_its_cells_showed() -> None:
    notebook = json.loads((ROOT / "docs" / "planning.ipynb").read_text())
    page = notebook_page(json.dumps(notebook))
    for cell in notebook["cells"]:
        assert "".join(cell["source"]) in page
    assert page.count('<div class="output">') == sum(
        len(c.get("outputs", ())) for c in notebook["cells"]
    )
    printed = {"output_type": "stream", "text": ["a\n\n<b>"]}
    cell = {"cell_type": "code", "source": ["print()"], "outputs": [printed]}
    assert "<pre>a&#10;&#10;&lt;b&gt;</pre>" in notebook_page(json.dumps({"cells": [cell]}))


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


ANSWERS = {
    "GPU": "install", "install": "install", "batch": "serving", "timeout": "troubleshooting",
    "quota": "serving", "error 429": "troubleshooting", "kubernetes": "cluster",
    "helm": "cluster", "docker": "operating", "prometheus": "watching", "price": "simulation",
    "tool calls": "serving", "LoRA": "models", "upgrade": "operating", "vllm": "vllm",
    "mac": "install", "ttft": "tuning", "benchmarks": "benchmarks", "slurm": "cluster",
}  # fmt: skip


def _guides_are_found_first(site: Path) -> None:
    """Asserts that guides come first in the results of the search code that the pages run."""
    node = shutil.which("node")
    if node is None:
        return
    line = [node, str(ROOT / "website" / "ask_search.mjs"), str(site), *ANSWERS]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    first = {
        query: pages[0].partition(".html")[0] for query, pages in json.loads(done.stdout).items()
    }
    assert first == ANSWERS


@pytest.mark.long
def test_the_site_is_built_with_all_links_and_without_foreign_parts(tmp_path: Path) -> None:
    build = write_sources(tmp_path)
    done = build()
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        assert not LOADED.search(page.read_text()), page
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())["docs"]
    ranks = {each["location"]: each["boost"] for each in index}
    assert len(ranks) > 500
    assert ranks["serving.html"] > ranks["commands.html"] > ranks["CHANGELOG.html"]
    _guides_are_found_first(tmp_path / "site")
    with (tmp_path / "source" / "tuning.md").open("a") as page_file:
        page_file.write("\n[x](serving.md#no-such-part)\n")
    done = build()
    assert done.returncode != 0 and "no-such-part" in done.stderr
