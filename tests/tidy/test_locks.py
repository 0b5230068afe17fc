"""Tests that the locks pin every package with its hashes, lack no package, and fit
pyproject.toml."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from lock import CPU_TORCH, CUDA, DEV, DOCS, LAB, ROOT, RUNS, TORCH, Lock, parse_lock, read_lock

LOCKS = {path.name: read_lock(path) for path in (RUNS, CUDA, LAB, DEV, DOCS)}
PROJECT, ENGINE, LAB_PROJECT = (
    tomllib.loads((ROOT / each / "pyproject.toml").read_text()) for each in ("", "engine", "lab")
)
WANTED = {
    RUNS.name: [
        *PROJECT["build-system"]["requires"],
        *PROJECT["project"]["dependencies"],
        *(line for line in ENGINE["project"]["dependencies"] if not line.startswith("moonpool")),
    ],
    LAB.name: [
        line for line in LAB_PROJECT["project"]["dependencies"] if not line.startswith("moonpool")
    ],
    DEV.name: PROJECT["dependency-groups"]["dev"],
    DOCS.name: PROJECT["dependency-groups"]["docs"],
}


def beside(name: str) -> Lock:
    """Returns the packages that an environment with this lock has."""
    below = {DOCS.name: [], DEV.name: [RUNS.name, LAB.name]}.get(name, [RUNS.name])
    return {key: value for each in (*below, name) for key, value in LOCKS[each].items()}


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_is_pinned_and_has_hashes(name: str) -> None:
    assert len(LOCKS[name]) >= 10
    for package, (requirement, hashes) in LOCKS[name].items():
        (pin,) = requirement.specifier
        assert pin.operator == "==" and not pin.version.endswith(".*"), f"{package}{pin}"
        assert hashes, f"{package} has no hash"
        for each in hashes:
            assert re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each), f"{package}: {each}"


def test_no_package_stands_in_two_locks_of_one_environment() -> None:
    runs, lab, dev = (LOCKS[path.name].keys() for path in (RUNS, LAB, DEV))
    assert not runs & lab and not (runs | lab) & dev
    assert LOCKS[RUNS.name].keys() & LOCKS[CUDA.name].keys() == {"torch"}


@pytest.mark.parametrize("name", WANTED)
def test_the_project_admits_what_is_pinned(name: str) -> None:
    pinned = beside(name)
    for line in WANTED[name]:
        wanted = Requirement(line)
        requirement, _ = pinned[canonicalize_name(wanted.name)]
        (pin,) = requirement.specifier
        assert wanted.specifier.contains(pin.version, prereleases=True), f"{line}: {pin}"


def needs_of(package: str, extras: set[str]) -> Iterator[Requirement]:
    """Yields the requirements of an installed package that apply on this machine. Raises
    PackageNotFoundError."""
    for line in distribution(package).requires or ():
        needed = Requirement(line)
        marker = needed.marker
        if marker is None or any(marker.evaluate({"extra": each}) for each in ("", *extras)):
            yield needed


def test_the_demo_needs_no_package_that_only_draws_or_plans() -> None:
    assert {"torch", "setuptools"} <= LOCKS[RUNS.name].keys()
    assert {"scipy", "matplotlib", "pillow"} <= LOCKS[LAB.name].keys()
    assert not {"pandas", "transformers"} & (LOCKS[RUNS.name].keys() | LOCKS[LAB.name].keys())


@pytest.mark.parametrize("name", [RUNS.name, LAB.name, DEV.name])
def test_what_a_package_needs_is_in_the_lock(name: str) -> None:
    """Names the packages that a lock lacks, because pip refuses an incomplete lock only when it
    installs."""
    pinned, checked = beside(name), 0
    roots = [Requirement(line) for line in WANTED[name]]
    extras = {canonicalize_name(root.name): set(root.extras) for root in roots}
    waiting = list(pinned)
    while waiting:
        package = waiting.pop()
        requirement, _ = pinned[package]
        try:
            has_it = distribution(package).version.partition("+")[0]
            needed = list(needs_of(package, extras.get(package, set())))
        except PackageNotFoundError:
            continue  # installed before the lock was changed
        (pin,) = requirement.specifier
        if Version(has_it) != Version(pin.version):
            continue
        checked += 1
        for each in needed:
            other = canonicalize_name(each.name)
            assert other in pinned, f"{package} needs {each}, which {name} lacks"
            (own,) = pinned[other][0].specifier
            assert each.specifier.contains(own.version, prereleases=True), f"{package}: {each}"
            new = each.extras - extras.get(other, set())
            if new:
                extras.setdefault(other, set()).update(new)
                waiting.append(other)
    assert checked > 40


def test_torch_is_the_release_that_the_tests_compare_with() -> None:
    torch, hashes = LOCKS[RUNS.name]["torch"]
    assert (f"torch{torch.specifier}", hashes) == (TORCH, CPU_TORCH)
    of_pypi, others = LOCKS[CUDA.name]["torch"]
    assert of_pypi.specifier == torch.specifier and not {*hashes} & {*others}


def test_the_image_takes_the_pins_of_the_lock() -> None:
    text = (ROOT / "deploy" / "container" / "Containerfile").read_text()
    script = re.search(r"sed -n '([^']+)' /tmp/requirements.lock > /tmp/pins", text)
    assert script is not None
    line = ["sed", "-n", script.group(1), str(RUNS)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    pins = [
        f"{requirement.name}{requirement.specifier}" for requirement, _ in LOCKS[RUNS.name].values()
    ]
    assert done.stdout.split() == pins


def test_a_lock_with_comments_and_conditions_is_read() -> None:
    text = (
        "# head\na==1 \\\n    --hash=sha256:00 \\\n    --hash=sha256:11\n"
        'B_c==2 ; python_version < "3.12" \\\n    --hash=sha256:22\n'
    )
    found = parse_lock(text)
    assert found["a"][1] == ("--hash=sha256:00", "--hash=sha256:11")
    assert str(found["b-c"][0].marker) == 'python_version < "3.12"'


@pytest.mark.long
def test_the_page_on_upgrades_installs_as_printed() -> None:
    page = (ROOT / "docs" / "operating.md").read_text()
    section = page[page.index("## Upgrading") :]
    lines = re.findall(r"^pip (install .*)$", section, re.M)
    assert len(lines) == 2
    pip = [sys.executable, "-m", "pip"]
    for line, more in zip(lines, (["--ignore-installed"], []), strict=True):
        words = [*pip, *line.split(), "--dry-run", *more]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900)
        if "NewConnectionError" in done.stderr:
            pytest.skip("no index of packages can be reached here")
        assert done.returncode == 0, done.stderr[-2000:]
        assert "Would install" in done.stdout
