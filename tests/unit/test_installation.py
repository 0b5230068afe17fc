"""Tests that the command that adds an extra fits the way in which moonpool was installed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonpool import installation
from moonpool.installation import checkout_of, install_command

ROOT = Path(__file__).parents[2]


class Installed:
    """Stands for the metadata of a distribution. None means that the distribution records
    nothing."""

    def __init__(self, origin: dict[str, Any] | None) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else msgspec.json.encode(self.origin).decode()


def command_for(
    origin: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch, extra: str = "vllm"
) -> list[str]:
    """Returns the command as the words into which a shell splits it."""
    monkeypatch.setattr(installation, "checkout_of", lambda module: None)
    monkeypatch.setattr(installation, "distribution", lambda name: Installed(origin))
    monkeypatch.setattr(installation, "which", lambda name: str(Path(sys.executable).parent / name))
    words = shlex.split(install_command(extra))
    assert words[:2] == ["pip", "install"]
    return words[2:]


def test_sources_that_run_from_a_checkout_are_installed_there_again() -> None:
    assert checkout_of(Path(installation.__file__).resolve()) == ROOT
    assert shlex.split(install_command("plan"))[-2:] == ["-e", f"{ROOT}[plan]"]


def test_a_package_in_an_environment_is_no_checkout(tmp_path: Path) -> None:
    module = tmp_path / "lib" / "site-packages" / "moonpool" / "installation.py"
    assert checkout_of(module) is None
    (tmp_path / "pyproject.toml").touch()  # makes the environment one inside another project
    assert checkout_of(tmp_path / "venv" / "moonpool" / "installation.py") is None


def test_an_index_is_asked_for_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command_for(None, monkeypatch) == ["moonpool[vllm]"]


@pytest.mark.parametrize("editable", [True, False])
def test_a_folder_is_installed_again(
    editable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my checkout"
    folder.mkdir()
    origin = {"url": folder.as_uri(), "dir_info": {"editable": True} if editable else {}}
    expected = [*(["-e"] if editable else []), f"{folder}[vllm]"]
    assert command_for(origin, monkeypatch) == expected
    folder.rmdir()
    assert command_for(origin, monkeypatch) == [
        ".[vllm]",
        "in",
        "a",
        "checkout",
        "of",
        "moonpool",
    ]


def test_a_wheel_is_installed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "moonpool-0.1.0-py3-none-linux_x86_64.whl"
    wheel.touch()
    origin = {"url": wheel.as_uri(), "archive_info": {}}
    assert command_for(origin, monkeypatch, "vllm") == [f"{wheel}[vllm]"]
    wheel.unlink()
    assert command_for(origin, monkeypatch)[0] == f"{wheel.name}[vllm]"


def test_an_address_and_a_commit_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "https://host/moonpool.git"
    origin: dict[str, Any] = {"url": url, "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    assert command_for(origin, monkeypatch) == [f"moonpool[vllm] @ git+{url}@abc"]
    origin = {"url": "https://host/m.whl", "archive_info": {}}
    assert command_for(origin, monkeypatch) == ["moonpool[vllm] @ https://host/m.whl"]


def test_another_package_of_the_repository_comes_from_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command_for(None, monkeypatch, "engine") == ["moonpool[engine]"]
    origin: dict[str, Any] = {"url": tmp_path.as_uri(), "dir_info": {"editable": True}}
    assert command_for(origin, monkeypatch, "engine") == ["-e", f"{tmp_path}/engine"]
    gone = {"url": (tmp_path / "gone").as_uri(), "dir_info": {}}
    assert command_for(gone, monkeypatch, "lab")[0] == "./lab"
    wheel = tmp_path / "moonpool-0.1.0-py3-none-any.whl"
    origin = {"url": wheel.as_uri(), "archive_info": {}}
    assert " ".join(command_for(origin, monkeypatch, "engine")).startswith("the wheel of")
    beside = tmp_path / "moonpool_engine-0.1.0-py3-none-manylinux_2_34_x86_64.whl"
    beside.touch()
    assert command_for(origin, monkeypatch, "engine") == [str(beside)]
    url = "https://host/moonpool.git"
    origin = {"url": url, "vcs_info": {"vcs": "git", "commit_id": "abc"}}
    found = f"moonpool-engine @ git+{url}@abc#subdirectory=engine"
    assert command_for(origin, monkeypatch, "engine") == [found]
    origin = {"url": "https://host/dist/m.whl", "archive_info": {}}
    assert command_for(origin, monkeypatch, "lab")[:4] == ["the", "wheel", "of", "moonpool-lab"]


def test_a_checkout_has_the_other_packages_in_folders() -> None:
    assert shlex.split(install_command("engine"))[-2:] == ["-e", str(ROOT / "engine")]
    assert (ROOT / "engine" / "pyproject.toml").is_file()


def test_the_installer_is_that_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "which", lambda name: f"/elsewhere/bin/{name}")
    words = shlex.split(install_command("plan"))
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    monkeypatch.setattr(installation, "find_spec", lambda name: None)
    words = shlex.split(install_command("plan"))
    assert words[:5] == ["uv", "pip", "install", "--python", sys.executable]


@pytest.mark.long
def test_what_the_command_names_is_taken_by_pip() -> None:
    words = shlex.split(install_command("plan"))
    line = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps"]
    line += ["--no-build-isolation", "-q", *words[words.index("install") + 1 :]]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_no_other_place_says_how_to_install_an_extra() -> None:
    """No page may have such a line written by hand, because it fits only one way of
    installation."""
    by_hand = re.compile(r"pip install[^\n]*(?:moonpool|\.)\[|moonpool\[\{?\w+\}?\]")
    own = ROOT / "src" / "moonpool" / "installation.py"
    found = [
        f"{path}:{number}: {line.strip()}"
        for folder in ("src", "engine", "lab")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != own
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if by_hand.search(line)
    ]
    assert not found, "\n".join(found)
