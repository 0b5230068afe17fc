"""Builds the native kernels at installation, if this machine can; all else is in pyproject.toml.

The kernels are for this machine's instruction set. `make wheel` sets MOONPOOL_RELEASE, because its
wheel is for other machines, and then has kernels for all instruction sets.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "src"))

from moonpool_engine.engine.native.build import BuildError, build  # noqa: E402

NATIVE = Path("moonpool_engine") / "engine" / "native"


class BuildWithKernels(build_py):
    """The package, and its kernels where a compiler is found; without them it runs on torch."""

    def run(self) -> None:
        super().run()
        if os.environ.get("MOONPOOL_BUILD_KERNELS", "1") == "0":
            print("moonpool kernels not built: MOONPOOL_BUILD_KERNELS is 0")
            return
        top = ROOT / "src" if self.editable_mode else Path(self.build_lib)
        try:
            built = build(top / NATIVE, everything=bool(os.environ.get("MOONPOOL_RELEASE")))
        except (BuildError, OSError) as error:
            print(f"moonpool kernels not built, the engine will run on plain torch: {error}")
        else:
            print(f"moonpool kernels built: {built}")


class WithLibrary(Distribution):
    """A package that belongs to one platform, though the kernels are not a module of Python."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """A wheel for any Python 3 of one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=WithLibrary, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
