"""The process that compiles clients' grammars first: `python -m moonpool.api.grammars.check_process
PARENT_PID`.

llguidance recurses as deep as a grammar's rules refer to each other, so a chain of some thousand
rules ends the process that compiles it. Other grammars take long, or much memory. This process has
a smaller stack than every thread that follows grammars, and limits on CPU time and memory: what it
compiles, an engine compiles too. The check process is a helper process (`helpers`) whose frames are
texts.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
import threading
import time

from moonpool.api.helpers.parent import Parent, join_parent
from moonpool.text.grammar import first_error

STACK_BYTES = 1 << 20
"""The C library gives threads 2 MiB at least, and 8 MiB usually."""
MAX_CPU_S = 1.0
MAX_MEMORY_BYTES = 1 << 30
TOO_COMPLEX = "its rules are nested too deeply, or need too much memory; simplify it"
TOO_LONG = f"it takes more than {MAX_CPU_S:g} s to compile; simplify it"


def trouble_of(grammar: str) -> str:
    """Returns why the grammar cannot be used, or "" if it can. Ends the process after too long."""
    began_s = time.process_time()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(began_s + MAX_CPU_S) + 1, hard))
    try:
        trouble = first_error(grammar)
    except MemoryError:
        return TOO_COMPLEX
    except BaseException as error:  # a panic of llguidance is not an Exception
        return f"it cannot be compiled: {error}"
    return TOO_LONG if time.process_time() - began_s > MAX_CPU_S else trouble


def _serve(parent: Parent) -> None:
    while (frame := parent.receive()) is not None:
        parent.send(trouble_of(frame.decode()).encode())


def main() -> None:
    parent = join_parent(int(sys.argv[1]))
    parent.send(parent.receive() or b"")  # replies that the process has imported what it needs
    os.nice(5)  # running answers have priority
    with contextlib.suppress(ValueError):  # macOS does not limit this resource
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_serve, args=(parent,))
    worker.start()
    worker.join()


if __name__ == "__main__":
    main()
