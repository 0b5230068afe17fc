"""The workloads of Mooncake's experiments: a public trace if it is present, else one drawn from the
generator's profile of that name, which the result states.

FAST'25 evaluates on three traces, `conversation`, `toolagent` and `synthetic`; arXiv v3 on one more
(`mooncake`, the arXiv trace), for which there is no profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import BLOCK_TOKENS, generate
from moonpool.trace.reader import open_trace
from moonpool.trace.row import TraceError, TraceRow
from papers.constants import MOONCAKE_QUICK_REQUESTS, SYNTHETIC_RPS
from papers.options import (
    TRACE_FILES,
    ExperimentError,
    MissingTraceError,
    Options,
)

TITLES = {"conversation": "conversation", "toolagent": "tool&agent", "synthetic": "synthetic"}
TABLE_2 = {  # FAST'25: requests, mean input, mean output
    "conversation": (12_031, 12_035, 343),
    "toolagent": (23_608, 8_596, 182),
    "synthetic": (3_993, 15_325, 149),
}


@dataclass(frozen=True, slots=True)
class MooncakeWorkload:
    """Rows in the order of time; `origin` is a sentence about their source."""

    name: str
    rows: Sequence[TraceRow]
    block_tokens: int  # of the trace's own blocks
    is_original: bool
    origin: str

    @property
    def title(self) -> str:
        title = TITLES.get(self.name, self.name)
        return title if self.is_original else f"{title}-like"


def read_workload(options: Options, name: str) -> MooncakeWorkload:
    """The public trace; only its first requests with `quick`. Raises MissingTraceError, and
    ExperimentError for one that cannot be used."""
    path = options.find_trace(name)
    limit = MOONCAKE_QUICK_REQUESTS if options.quick else None
    try:
        trace = open_trace(path)
        if not trace.info.block_tokens:
            raise ExperimentError(f"{path} names no blocks of its prompts; use a Mooncake trace")
        rows = list(trace if limit is None else islice(trace, limit))
    except TraceError as error:
        raise ExperimentError(str(error)) from None
    options.check_whole(name, len(rows))
    part = "whole" if limit is None else f"the first {len(rows):,} requests"
    origin = f"{name} trace: the file {path.name}, {part}"
    return MooncakeWorkload(name, rows, trace.info.block_tokens, True, origin)


def find_workload(options: Options, name: str) -> MooncakeWorkload:
    """The public trace if it is here, else a generated one. Raises ExperimentError."""
    if options.trace is None:
        try:
            return read_workload(options, name)
        except MissingTraceError:
            return _generated(options, name)
    if options.trace.name == TRACE_FILES.get(name):
        return read_workload(options, name)
    return _generated(options, name)


def _generated(options: Options, name: str) -> MooncakeWorkload:
    number, mean_input, mean_output = TABLE_2[name]
    if options.quick:
        number = MOONCAKE_QUICK_REQUESTS
    rate = SYNTHETIC_RPS if name == "synthetic" else None
    rows = list(generate(BUILT_IN[name], num_requests=number, seed=options.seed, rate_rps=rate))
    ours_input = sum(row.input_tokens for row in rows) / number
    ours_output = sum(row.output_tokens for row in rows) / number
    origin = (
        f"{TITLES[name]}-like: generated to the published means, the original is not at hand; "
        f"{number:,} requests, mean input {ours_input:,.0f} (Table 2: {mean_input:,}), output "
        f"{ours_output:,.0f} ({mean_output:,})"
        + ("" if rate is None else f", {rate:g} a second (by Fig. 13; not published)")
    )
    return MooncakeWorkload(name, rows, BLOCK_TOKENS, False, origin)


def read_one_of(options: Options, *names: str) -> MooncakeWorkload:
    """Returns the first of these public traces that is present. A file from --trace is identified
    by its name, or else counts as the last of them. Raises MissingTraceError for the last, if there
    is none."""
    for name in names[:-1]:
        if options.trace is not None and options.trace.name != TRACE_FILES[name]:
            continue
        try:
            return read_workload(options, name)
        except MissingTraceError:
            if options.trace is not None:
                raise
    return read_workload(options, names[-1])


def find_v3_workload(options: Options) -> MooncakeWorkload:
    """Returns the real trace of arXiv v3 if it is present, else tool&agent, which is probably of
    the same hour because it has the same number of requests and the same mean answer. Raises
    ExperimentError."""
    try:
        found = read_one_of(options, "mooncake", "toolagent")
    except MissingTraceError:
        found = _generated(options, "toolagent")
    if found.name == "mooncake":
        return found
    origin = f"v3's trace is not at hand; in its place {found.origin}"
    return replace(found, origin=origin)
