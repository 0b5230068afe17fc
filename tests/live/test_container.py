"""The image of `make release` has the expected files, runs without root, has no timestamps, and
serves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from image import CHROOT, DEBIAN, TAG, Images, missing, parts_of
from moonpool import __version__
from moonpool_engine.engine.native.build import library_name, open_library, usable_isas
from moonpool_lab.demo.local_server import free_port
from tests.live.calls import fresh
from tests.live.waiting import wait_until_ready

BUILT_S = 1_700_000_000

pytestmark = [
    pytest.mark.live,
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(missing(DEBIAN)), reason=f"no image here: {missing(DEBIAN)}"),
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    place = tmp_path_factory.mktemp("images")
    images = Images(place, BUILT_S)
    try:
        images.build(images.debian(), None, __version__)
        yield images
    finally:  # deletes the image, which has several GB
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="module")
def container(images: Images) -> str:
    return images.buildah("from", TAG)


def inside(images: Images, container: str, *words: str) -> str:
    return images.buildah("run", *CHROOT, container, "--", *words)


def test_it_is_an_oci_image_that_runs_without_root(images: Images, tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    images.buildah("push", "-q", TAG, f"oci:{layout}:moonpool")
    index = json.loads((layout / "index.json").read_text())
    (named,) = index["manifests"]
    assert named["annotations"]["org.opencontainers.image.ref.name"] == "moonpool"

    def blob(digest: str) -> dict[str, object]:
        found: dict[str, object] = json.loads(
            (layout / "blobs" / digest.replace(":", "/")).read_text()
        )
        return found

    manifest = blob(named["digest"])
    described = blob(manifest["config"]["digest"])  # type: ignore[index]
    config: dict[str, object] = described["config"]  # type: ignore[assignment]
    assert config["User"] == "10001"
    assert config["Entrypoint"] == ["moonpool"]
    assert config["Labels"]["org.opencontainers.image.version"] == __version__  # type: ignore[index]
    assert described["created"] == "2023-11-14T22:13:20Z"
    shutil.rmtree(layout)


def test_it_has_moonpool_with_its_kernels_and_no_compiler(images: Images, container: str) -> None:
    assert __version__ in inside(images, container, "moonpool", "--version")
    code = (
        "import os, pathlib, shutil, torch, moonpool_engine.engine as engine;"
        "native = pathlib.Path(engine.__file__).parent / 'native';"
        "names = [path.name for path in native.glob('*.so')];"
        "print(os.getuid(), *names, shutil.which('g++'), torch.__version__)"
    )
    # This name is that of a library for all instruction sets.
    found = f"10001 {library_name()} None 2.13.0+cpu"
    assert inside(images, container, "python", "-c", code) == found


def test_its_doctor_finds_nothing_amiss_with_the_installation(
    images: Images, container: str
) -> None:
    said = inside(images, container, "moonpool", "doctor")
    library = open_library()
    assert library is not None
    kernels = f"built, for {', '.join(usable_isas(library))}"
    # the last line says what is installed, and no advice follows it
    assert __version__ in said and kernels in said.splitlines()[-2]


def test_its_parts_are_listed_and_its_byte_code_holds_no_time(
    images: Images, container: str
) -> None:
    root = Path(images.buildah("mount", container))
    debian, python = parts_of(root)
    assert {"libc6", "python3"} <= {*debian} and "g++" not in debian
    assert python["torch"] == "2.13.0+cpu" and python["moonpool"] == __version__
    (compiled,) = root.glob("usr/local/lib/python3.*/*-packages/moonpool/__pycache__/types.*.pyc")
    # such byte code names its source by a hash that Python does not check
    assert compiled.read_bytes()[4:8] == b"\x01\0\0\0"
    assert not (root / "source").exists() and not [*root.glob("media/*")]


def test_it_serves(images: Images, container: str, tmp_path: Path) -> None:
    port = free_port()
    line = images.line("run", *CHROOT, container, "--", "moonpool", "serve", "--port", str(port))
    log = tmp_path / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(line, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_until_ready(server, port, log)
        body = {"prompt": "one two one", "max_tokens": 2, "temperature": 0}
        answer = fresh.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert "runs on native kernels" in log.read_text()
    finally:
        stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    """Ends the session of buildah, which passes no signal to processes in the chroot."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(60)
        return
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
