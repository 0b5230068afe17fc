"""Every command, flag and link in the pages exists."""

from __future__ import annotations

import json
import re
import shlex
from importlib.metadata import distribution
from pathlib import Path

import click
import pytest
from test_structure import LEVELS

from benchmarks import page_pool
from benchmarks.clients import page as clients_page
from benchmarks.clients.environments import read_clients
from benchmarks.compatibility import page as compatibility_page
from benchmarks.page import PAGE as BENCHMARK_PAGE
from benchmarks.page import page as benchmark_page
from moonpool.cli.main import cli
from moonpool.config.parse import parse_config
from moonpool.config.tables import Config

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[tuple[str, str]]:
    """Returns (page, command line) of every moonpool command in a shell block."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.S):
            for line in block.splitlines():
                line = line.split("#")[0].strip().removeprefix(".venv/bin/")
                if line.startswith("moonpool "):
                    found.append((page.name, line))
    return found


def test_there_are_commands_to_check() -> None:
    assert len(commands()) >= 5


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_and_flags_exist(page: str, line: str) -> None:
    words = shlex.split(line)[1:]
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group):
        name = words.pop(0)
        chosen = command.get_command(context, name)
        assert chosen is not None, f"{page}: there is no command {name}"
        command = chosen
    flags = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    for word in words:
        if word.startswith("--"):
            assert word.split("=")[0] in flags, f"{page}: {line}: no flag {word}"


def test_flags_in_tables_exist() -> None:
    serve = cli.get_command(click.Context(cli), "serve")
    assert serve is not None
    flags = {flag for option in serve.params for flag in (*option.opts, *option.secondary_opts)}
    table = (ROOT / "docs" / "serving.md").read_text()
    for row in re.findall(r"^\| (`--.*?) \|", table, re.M):
        for flag in re.findall(r"--[a-z-]+", row):
            assert flag in flags, flag


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_make_targets_in_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
            assert target in targets, f"{page.name}: make {target}"


def test_the_pages_install_from_a_clone_and_name_known_extras() -> None:
    """No page may install moonpool from an index. moonpool is in no index, so a package of that
    name would be somebody else's."""
    provided = set(distribution("moonpool").metadata.get_all("Provides-Extra") or ())
    named = set()
    for page in PAGES:
        text = page.read_text()
        by_name = re.search(r"(?:pip|pipx|uv tool) install '?moonpool", text)
        assert page.name == "CHANGELOG.md" or not by_name, page.name
        named |= set(re.findall(r"install (?:-e )?'\.\[([\w,]+)\]'", text))
    extras = {extra for group in named for extra in group.split(",")}
    assert {"engine", "vllm", "plan"} <= extras <= provided


def test_the_tables_of_the_config_are_those_the_page_names() -> None:
    named = re.findall(r"`((?:\[[a-z]+\] ?)+)`", (ROOT / "docs" / "serving.md").read_text())
    tables = {t for group in named for t in re.findall(r"\[([a-z]+)\]", group)}
    assert tables == set(Config.__struct_fields__)
    assert parse_config("") == Config()


def test_the_benchmark_page_is_what_the_results_give() -> None:
    assert benchmark_page() == BENCHMARK_PAGE.read_text(), "run `python -m benchmarks.page`"


def test_the_table_of_pools_is_what_the_result_gives() -> None:
    result = json.loads(page_pool.RESULT.read_text())
    page = page_pool.PAGE.read_text()
    section = page_pool.pool_section(result)
    assert page_pool.SECTION.within(page, section) == page, "run `python -m benchmarks.page_pool`"


def test_the_clients_page_is_what_the_results_give() -> None:
    again = "run `python -m benchmarks.clients`"
    assert clients_page.current() == clients_page.PAGE.read_text(), again
    results = json.loads(clients_page.RESULTS.read_text())["clients"]
    tried = [(row["name"], row["version"]) for row in results]
    assert tried == [(client.name, client.version) for client in read_clients()], again
    assert all(row["tries"] or row["install_error"] for row in results)


def test_the_compatibility_page_is_what_the_results_give() -> None:
    again = "run `python -m benchmarks.compatibility --page`"
    assert compatibility_page.current() == compatibility_page.PAGE.read_text(), again


def test_every_room_is_in_the_map() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text[text.index("## Rooms") :]
    named = {room for row in re.findall(r"^\| `([\w./]+)` \|", table, re.M) for room in [row]}
    assert named == {room for rooms in LEVELS for room in rooms}


def test_files_in_the_map_and_the_glossary_exist() -> None:
    missing = []
    bases = [ROOT / folder for folder in ("src/moonpool", "engine/src", "lab/src", ".")]
    for name in ("architecture.md", "glossary.md"):
        text = (ROOT / "docs" / name).read_text()
        for path in re.findall(r"`((?:\w+/)*\w+\.py)`", text):
            if not any((base / path).is_file() for base in bases):
                missing.append(f"{name}: {path}")
    assert not missing, "\n".join(missing)
