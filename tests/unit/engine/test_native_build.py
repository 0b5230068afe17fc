"""Kernels that are not built, or cannot run, give one line with the reason, and the engine runs
without them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool_engine.engine.native import available, build
from moonpool_engine.engine.native import library as native_library
from moonpool_engine.engine.native.library import NativeUnavailableError, open_kernels
from moonpool_engine.engine.native.slices import open_slices

ROOT = Path(__file__).parents[3]


@pytest.fixture
def sources_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a copy of the sources without builds, and a separate cache folder."""
    copy = tmp_path / "native"
    shutil.copytree(build.HERE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    monkeypatch.setattr(build, "HERE", copy)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return copy


def test_without_a_library_the_reason_says_how_to_build(sources_in: Path) -> None:
    reason = available()
    assert reason is not None
    assert f"`{sys.executable} -m moonpool_engine.engine.native.build` builds them" in reason
    with pytest.raises(NativeUnavailableError, match="not built"):
        open_kernels()


def test_without_a_compiler_building_says_so_and_does_not_fail(
    sources_in: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(sources_in))
    assert build.main() == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "not built" in said
    assert "no C++ compiler on PATH" in said or "x86-64" in said


def test_a_failing_compiler_is_one_line_too(
    sources_in: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = sources_in / "g++"
    fake.write_text("#!/bin/sh\necho 'first line\nfatal error: broken' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(sources_in))
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    assert build.main() == 0
    assert "g++ failed: fatal error: broken" in capsys.readouterr().out


def test_a_changed_source_is_another_library(sources_in: Path) -> None:
    before = build.library_name()
    (sources_in / before).write_bytes(b"")
    assert build.find_library() == sources_in / before
    with (sources_in / "simd.h").open("a") as source:
        source.write("// changed\n")
    assert build.library_name() != before
    assert build.find_library() is None


def test_a_file_that_is_no_library_is_a_reason_not_a_crash(sources_in: Path) -> None:
    (sources_in / build.library_name()).write_bytes(b"not a library")
    reason = available()
    assert reason is not None
    assert "do not load" in reason


def test_a_cpu_without_the_instructions_is_told_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    if available() is not None:
        pytest.skip(str(available()))
    own = native_library.open_file
    library, usable = own(build.find_library() or Path())
    if len(usable) < 2:
        pytest.skip("the kernels here have one instruction set")
    monkeypatch.setattr(native_library, "open_file", lambda path: (library, usable[:1]))
    assert open_kernels()[0] == usable[0]
    with pytest.raises(NativeUnavailableError, match=f"they have {usable[0]}"):
        open_kernels(native_library.ISAS[-1])
    with pytest.raises(NativeUnavailableError, match="no kernels for 'neon'"):
        open_kernels("neon")


@pytest.mark.skipif(available() is not None, reason="the kernels cannot run here")
def test_a_library_for_one_instruction_set_is_this_cpus_and_gives_way_to_a_whole_one(
    sources_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[str, ...]] = []

    def compile_library(compiler: str, isas: dict[str, tuple[str, ...]], work: Path) -> Path:
        compiled.append(tuple(isas))
        named = "".join(f'extern "C" int moonpool_slices_name_{isa} = 0;\n' for isa in isas)
        source, made = work / "made.cpp", work / "made.so"
        source.write_text((sources_in / "cpu.cpp").read_text() + named)
        subprocess.run((compiler, "-shared", "-fPIC", source, "-o", made), check=True)
        return made

    monkeypatch.setattr(build, "compile_library", compile_library)
    (sources_in / "_kernels-0123456789abcdef.so").write_bytes(b"of older sources")
    one = build.build()
    (isa,) = compiled.pop()
    assert one.stem == f"{Path(build.library_name()).stem}-{isa}"
    assert [build.find_library(), *sources_in.glob("*.so")] == [one, one]
    assert build.build() == one and not compiled
    library = build.open_library()
    assert library is not None
    assert build.usable_isas(library) == (isa,) and build.best_isa(library) == isa
    whole = build.build(everything=True)
    assert compiled == [tuple(build.ISA_FLAGS)] and whole.name == build.library_name()
    assert [build.build(), *sources_in.glob("*.so")] == [whole, whole]


@pytest.mark.skipif(available() is not None, reason="the kernels cannot run here")
def test_a_library_of_another_cpu_is_a_reason_and_is_built_again(sources_in: Path) -> None:
    other = sources_in / f"{Path(build.library_name()).stem}-other.so"
    compiler = shutil.which("g++") or shutil.which("c++") or pytest.skip("no compiler")
    source = sources_in / "cpu.cpp"
    subprocess.run((compiler, "-shared", "-fPIC", source, "-o", other), check=True)
    with pytest.raises(NativeUnavailableError, match=r"built for another CPU: run `.* -m"):
        open_kernels()
    assert not build.is_for_this_cpu(other)
    assert open_slices() is None


@pytest.mark.long
def test_an_installation_without_kernels_needs_no_compiler(tmp_path: Path) -> None:
    skipped = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "engine", tmp_path, ignore=skipped, dirs_exist_ok=True)
    done = subprocess.run(
        (sys.executable, "setup.py", "-q", "build_py", "--build-lib", "built"),
        cwd=tmp_path,
        env={**os.environ, "MOONPOOL_BUILD_KERNELS": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "MOONPOOL_BUILD_KERNELS is 0" in done.stdout
    assert (tmp_path / "built/moonpool_engine/engine/native/simd.h").is_file()
    assert not list(tmp_path.rglob("*.so"))
