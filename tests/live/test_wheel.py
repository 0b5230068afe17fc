"""The wheel works in an environment of its own, away from any checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1800)]


def run(*command: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `moonpool` command of a new environment that has the wheel.

    Its dependencies are those of the environment that runs the tests, by a path file. That file
    brings no editable installation along.
    """
    place = tmp_path_factory.mktemp("wheel")
    wheel = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(place))
    run(sys.executable, *wheel, str(ROOT), cwd=place)
    run(sys.executable, "-m", "venv", str(place / "venv"), cwd=place)
    python = place / "venv" / "bin" / "python"
    (found,) = place.glob("moonpool-*.whl")
    run(str(python), "-m", "pip", "install", "-q", "--no-deps", str(found), cwd=place)
    (site,) = (place / "venv" / "lib").glob("python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(str(python), "-c", "import moonpool; print(moonpool.__file__)", cwd=place)
    assert str(place) in where.stdout
    return place / "venv" / "bin" / "moonpool"


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
