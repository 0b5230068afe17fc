"""The wheels work in a new environment, away from any checkout, and the sdist is complete."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from moonpool_engine.engine.native.build import library_name
from moonpool_lab.demo.local_server import free_port
from tests.live.calls import fresh
from tests.live.waiting import wait_until_ready

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1800)]


def run(*command: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with the output of `make wheel`."""
    place = tmp_path_factory.mktemp("made") / "dist"
    as_they_are = ("-o", ".venv/.installed", "-o", ".venv/.installed-dev")
    run("make", *as_they_are, "wheel", f"DIST={place}", cwd=ROOT)
    return place


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the `moonpool` command of a new environment that has the three wheels.

    A path file gives it the dependencies of the environment that runs the tests, but not its
    editable installation of moonpool.
    """
    place = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "venv", str(place / "venv"), cwd=place)
    python = place / "venv" / "bin" / "python"
    wheels = [str(path) for path in dist.glob("*.whl")]
    assert len(wheels) == 3
    run(str(python), "-m", "pip", "install", "-q", "--no-deps", *wheels, cwd=place)
    (site,) = (place / "venv" / "lib").glob("python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(str(python), "-c", "import moonpool; print(moonpool.__file__)", cwd=place)
    assert str(place) in where.stdout
    return place / "venv" / "bin" / "moonpool"


def test_only_the_engine_is_for_one_platform_and_an_extra_names_its_version(dist: Path) -> None:
    for name in ("moonpool", "moonpool_lab"):
        (wheel,) = dist.glob(f"{name}-*.whl")
        assert wheel.name.endswith("-py3-none-any.whl")
    (wheel,) = dist.glob("moonpool-*.whl")
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    assert "Requires-Dist: moonpool-engine==" in archive.read(metadata).decode()


def test_the_wheel_has_its_kernels_and_no_second_openmp(dist: Path) -> None:
    (wheel,) = dist.glob("moonpool_engine-*.whl")
    assert "-py3-none-manylinux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    kernels = [name for name in names if name.endswith(".so")]
    assert [Path(name).name for name in kernels] == [library_name()]
    assert not any("libgomp" in name for name in names)


def test_a_prompt_runs_through_the_kernels_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    port = free_port()
    log = tmp_path / "log"
    with log.open("wb") as out:
        line = [str(installed), "serve", "--port", str(port)]
        server = subprocess.Popen(line, cwd=tmp_path, stdout=out, stderr=out)
    try:
        wait_until_ready(server, port, log)
        body = {"prompt": "one two one", "max_tokens": 2, "temperature": 0}
        answer = fresh.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        (worker, *_) = fresh.get(f"http://127.0.0.1:{port}/cluster").json()["instances"]
        mapped = Path(f"/proc/{worker['pid']}/maps").read_text()
    finally:
        server.terminate()
        server.wait(60)
    kernels = {line.split()[-1] for line in mapped.splitlines() if "_kernels-" in line}
    assert [str(installed.parent.parent) in path for path in kernels] == [True]
    assert len({line.split()[-1] for line in mapped.splitlines() if "libgomp" in line}) == 1
    assert "runs on native kernels" in log.read_text()


def test_the_sdist_has_every_file_of_the_checkout(dist: Path) -> None:
    (sdist,) = dist.glob("moonpool-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = run("git", "ls-files", cwd=ROOT).stdout.splitlines()
    missing = [n for n in tracked if n not in names and n not in (".gitignore", ".ci/run")]
    assert not missing
    assert not [name for name in names if name.endswith(".so")]


def test_the_demo_runs_and_all_answers_are_right(installed: Path, tmp_path: Path) -> None:
    shown = run(str(installed), "demo", cwd=tmp_path).stdout
    assert "right" in shown


def test_the_wheel_has_the_benchmarks_of_a_users_own_deployment(
    installed: Path, tmp_path: Path
) -> None:
    listed = run(str(installed), "bench", "--help", cwd=tmp_path).stdout
    assert all(name in listed for name in ("capacity", "store", "transfer"))
    assert "colocated" not in listed
    refused = run(str(installed), "bench", "colocated", cwd=tmp_path, check=False)
    assert refused.returncode and "checkout" in refused.stderr
    refused = run(str(installed), "reproduce", "--list", cwd=tmp_path, check=False)
    assert refused.returncode and "checkout" in refused.stderr
