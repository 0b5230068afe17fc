"""The base wheel is installed in an empty environment without a compiler. The wheel is small, runs
on any platform and does not need torch; the simulator and the vLLM front work."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from moonpool.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
MAX_MB = 145  # of the installed files, without byte code, which some installers do not write

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1800)]


def run(*command: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"CXX": "/nonexistent/c++", "CC": "/nonexistent/cc"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder with an environment that has only the wheel and its dependencies."""
    place = tmp_path_factory.mktemp("base")
    wheel = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(place))
    run(sys.executable, *wheel, str(ROOT), cwd=place)
    run(sys.executable, "-m", "venv", str(place / "venv"), cwd=place)
    (found,) = place.glob("moonpool-*.whl")
    assert found.name.endswith("-py3-none-any.whl")
    run(str(place / "venv/bin/python"), "-m", "pip", "install", "-q", str(found), cwd=place)
    return place


def moonpool(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(str(place / "venv/bin/moonpool"), *arguments, cwd=place, check=False)


def test_it_is_small_and_has_no_torch(place: Path) -> None:
    (site,) = (place / "venv/lib").glob("python*/site-packages")
    names = {path.name for path in site.iterdir()}
    assert not names & {"torch", "scipy", "matplotlib", "transformers"}
    installers = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
    own = [p for p in site.iterdir() if not p.name.startswith(installers)]
    files = [f for p in own for f in (p.rglob("*") if p.is_dir() else [p]) if f.is_file()]
    assert sum(f.stat().st_size for f in files if f.suffix != ".pyc") / 1e6 < MAX_MB


def test_it_simulates(place: Path) -> None:
    made = moonpool(place, "trace", "generate", "--requests", "30", "-o", "trace.jsonl")
    assert made.returncode == 0, made.stderr
    line = ("simulate", "--trace", "trace.jsonl", "--report", "run.html", "--json", "a.json")
    assert "effective" in moonpool(place, *line).stdout
    assert moonpool(place, "report", "a.json", "-o", "b.html").returncode == 0


def test_it_fronts_vllm(place: Path) -> None:
    assert "--vllm" in moonpool(place, "serve", "--help").stdout
    assert "--head-port" in moonpool(place, "head", "--help").stdout
    modules = "moonpool.head.cluster, moonpool.vllm.worker, moonpool.cli.worker"
    run(str(place / "venv/bin/python"), "-c", f"import {modules}", cwd=place)
    refused = moonpool(place, "serve", "--port", "0", "--vllm", "http://127.0.0.1:9")
    assert (
        refused.stderr.strip()
        == "moonpool: the server at http://127.0.0.1:9: no server listens there"
    )


def test_the_oldest_packages_it_allows_are_enough(place: Path, tmp_path: Path) -> None:
    """Skips where other software of the environment, such as vLLM, keeps some packages at older
    versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = [line.replace(">=", "==") for line in project["dependencies"]]
    assert len(oldest) > 10 and all("==" in line for line in oldest)
    (tmp_path / "oldest.txt").write_text("\n".join(oldest))
    python = str(tmp_path / "venv/bin/python")
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"), cwd=tmp_path)
    (wheel,) = place.glob("moonpool-*.whl")
    run(python, "-m", "pip", "install", "-q", "-c", "oldest.txt", str(wheel), cwd=tmp_path)
    for command in COMMANDS:
        run(python, "-m", "moonpool", command, "--help", cwd=tmp_path)
    line = (python, "-m", "moonpool", "trace", "generate", "--requests", "30", "-o", "trace.jsonl")
    run(*line, cwd=tmp_path)
    line = (python, "-m", "moonpool", "simulate", "--trace", "trace.jsonl", "--report", "run.html")
    assert "effective" in run(*line, cwd=tmp_path).stdout
    refused = run(*line[:3], "serve", "--vllm", "http://127.0.0.1:9", cwd=tmp_path, check=False)
    assert (
        refused.stderr.strip()
        == "moonpool: the server at http://127.0.0.1:9: no server listens there"
    )


@pytest.mark.parametrize(
    ("line", "extra"),
    [
        (("serve",), "engine"),
        (("demo",), "lab"),
        (("pool", "verify"), "engine"),
        (("trace", "info", "trace.jsonl", "--plot", "a.png"), "lab"),
        (("plan", "--trace", "trace.jsonl"), "plan"),
    ],
)
def test_what_is_absent_is_one_line(place: Path, line: tuple[str, ...], extra: str) -> None:
    moonpool(place, "trace", "generate", "--requests", "30", "-o", "trace.jsonl")
    refused = moonpool(place, *line)
    assert refused.returncode == 1
    assert len(refused.stderr.strip().splitlines()) == 1
    command = refused.stderr.strip().partition("not installed: ")[2]
    (wheel,) = place.glob("moonpool-*.whl")
    if extra == "plan":
        assert command.endswith(f"install '{wheel}[{extra}]'")
        run(*shlex.split(command), "--dry-run", "--no-deps", cwd=place)
    else:
        assert command.endswith(f"the wheel of moonpool-{extra} beside {wheel.name}")
