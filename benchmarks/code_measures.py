"""How large and how readable the code base is: `python -m benchmarks.code_measures [ROOT]`.

Prints one JSON object. With the root of another checkout as argument, it measures that checkout, so
that two states can be compared by one command. `--save` also counts the files of one request
(`benchmarks.walk`) and writes both to benchmarks/results/code.json.
"""

from __future__ import annotations

import ast
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.checkout import ROOT
from benchmarks.walk import walk
from moonpool.cli.output import origin
from moonpool.distributions import percentiles

LONG_FILE_LINES = 350
PURE_ROOMS = (
    *("types", "config", "request_record", "metrics", "kvcache", "cost", "protocol"),
    *("scheduler", "workers", "batching", "conductor", "sim/hardware"),
    *("attention_offload/pools", "vllm/block_names", "vllm/instance"),
)
_STATES = re.compile(r"\brais(es|ed|e)\b", re.IGNORECASE)


def measure(root: Path) -> dict[str, Any]:
    """Returns all figures of the checkout at `root`."""
    package = root / "src" / "moonpool"
    modules = sorted(package.rglob("*.py"))
    native = [p for p in sorted(package.rglob("*")) if p.suffix in (".cpp", ".h")]
    lines = {path: _num_lines(path) for path in [*modules, *native]}
    folders = Counter(path.parent for path in modules)
    widest, num_modules = folders.most_common(1)[0]
    beside = [p for room in ("benchmarks", "papers") for p in (root / room).rglob("*.py")]
    return {
        "package": {
            "lines": sum(lines.values()),
            "files": len(lines),
            "pure_room_lines": sum(n for p, n in lines.items() if _is_pure(p, package)),
            "files_above_350_lines": sum(n > LONG_FILE_LINES for n in lines.values()),
            "longest": max((n, str(p.relative_to(package))) for p, n in lines.items()),
            "widest_folder": [str(widest.relative_to(package)), num_modules],
            "class_names_in_two_files": _repeated_classes(modules),
        },
        "beside_the_package": {"lines": sum(map(_num_lines, beside)), "files": len(beside)},
        "functions": _functions(modules),
        "docstrings": _docstrings(modules),
        "docs": _sentences(root),
    }


def _num_lines(path: Path) -> int:
    return path.read_text().count("\n")


def _is_pure(path: Path, package: Path) -> bool:
    name = str(path.relative_to(package).with_suffix(""))
    return any(name == room or name.startswith(f"{room}/") for room in PURE_ROOMS)


def _repeated_classes(modules: list[Path]) -> int:
    names = Counter(
        node.name
        for path in modules
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return sum(count > 1 for count in names.values())


def _all_functions(modules: list[Path]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


def _named_functions(modules: list[Path]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions that others can call by name: functions of modules and classes, but none within
    another function."""
    for path in modules:
        bodies: list[ast.Module | ast.ClassDef] = [ast.parse(path.read_text())]
        for body in bodies:  # grows
            for node in body.body:
                if isinstance(node, ast.ClassDef):
                    bodies.append(node)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield node


def _raises(function: ast.AST) -> bool:
    return any(isinstance(node, ast.Raise) and node.exc for node in ast.walk(function))


def _is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the function is a command. Its docstring is then the help text, and no caller needs
    to know its errors."""
    return any(".command(" in ast.unparse(d) for d in function.decorator_list)


def _functions(modules: list[Path]) -> dict[str, Any]:
    lengths = sorted((f.end_lineno or f.lineno) - f.lineno + 1 for f in _all_functions(modules))
    return {"number": len(lengths), **_quantiles(lengths), "longest": lengths[-1]}


def _docstrings(modules: list[Path]) -> dict[str, float]:
    public = [f for f in _named_functions(modules) if not f.name.startswith("_")]
    raising = [f for f in public if _raises(f) and not _is_command(f)]
    stated = sum(bool(_STATES.search(ast.get_docstring(f) or "")) for f in raising)
    texts = [text for f in public if (text := ast.get_docstring(f))]
    words = [len(sentence.split()) for text in texts for sentence in _split(text)]
    return {
        "public_functions": len(public),
        "share_with_docstring": round(len(texts) / len(public), 3),
        "functions_that_raise": len(raising),
        "share_that_states_errors": round(stated / max(1, len(raising)), 3),
        "median_words_per_sentence": statistics.median(words),
    }


def _sentences(root: Path) -> dict[str, Any]:
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    words = []
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for paragraph in re.split(r"\n\s*\n", text):
            if not paragraph.lstrip().startswith(("|", "#")):
                words += [len(sentence.split()) for sentence in _split(paragraph)]
    return {"pages": len(pages), "words": sum(words), **_quantiles(words)}


def _split(text: str) -> list[str]:
    """Splits prose into sentences; a list item is one."""
    joined = re.sub(r"\n\s*[-*\d.]+ ", ". ", text)
    return [s for s in re.split(r"(?<=[.!?:])\s+", " ".join(joined.split())) if len(s.split()) > 1]


def _quantiles(lengths: list[int]) -> dict[str, float]:
    return percentiles(lengths, 50, 90, 99)


def main() -> None:
    """Prints or saves the figures."""
    if "--save" in sys.argv[1:]:
        files = walk(ROOT)
        walked = {name: len(names) for name, names in files.items()}
        found = measure(ROOT) | {"walk": walked}
        found["origin"] = origin() | {"command": "python -m benchmarks.code_measures --save"}
        (ROOT / "benchmarks" / "results" / "code.json").write_text(
            json.dumps(found, indent=1) + "\n"
        )
        return
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    if not (place / "src" / "moonpool").is_dir():
        sys.exit(f"{place} is no checkout of moonpool; {__doc__.splitlines()[0]}")
    sys.stdout.write(json.dumps(measure(place), indent=2) + "\n")


if __name__ == "__main__":
    main()
