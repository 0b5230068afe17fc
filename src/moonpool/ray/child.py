"""Becomes another program, which the kernel ends with the process that started it.

python -m moonpool.ray.child PARENT_PID PROGRAM ARGUMENT...
"""

from __future__ import annotations

import os
import sys

from moonpool.children.parent import end_with

if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the command line of an own process
