"""The image of deploy/container: it is built, has what it should, and serves."""

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

from moonpool import __version__
from moonpool_lab.demo.local_server import free_port
from tests.live.calls import fresh
from tests.live.container_image import CHROOT, Images, missing
from tests.live.waiting import wait_until_ready

TAG = "localhost/moonpool"

pytestmark = [
    pytest.mark.live,
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    place = tmp_path_factory.mktemp("images")
    images = Images(place)
    try:
        images.build(images.base(), TAG)
        yield images
    finally:  # several GB
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
    config = blob(manifest["config"]["digest"])["config"]  # type: ignore[index,call-overload]
    assert config["User"] == "10001"
    assert config["Entrypoint"] == ["moonpool"]
    shutil.rmtree(layout)


def test_it_has_moonpool_with_its_kernels_and_no_compiler(images: Images, container: str) -> None:
    assert __version__ in inside(images, container, "moonpool", "--version")
    code = (
        "import os, pathlib, shutil, torch, moonpool;"
        "native = pathlib.Path(moonpool.__file__).parent / 'engine/native';"
        "print(os.getuid(), len(list(native.glob('*.so'))), shutil.which('g++'), torch.__version__)"
    )
    assert inside(images, container, "python", "-c", code) == "10001 1 None 2.13.0+cpu"


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
    """Ends the session of buildah: it passes no signal on to what runs in the chroot."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(60)
        return
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
