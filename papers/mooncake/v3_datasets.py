"""The data sets of v3's Table 2, drawn from the means that it prints: ArXiv summarisation, L-Eval,
and simulated prompts of one length."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from moonpool.trace.generate import BLOCK_TOKENS
from moonpool.trace.row import TraceRow
from papers.mooncake.workload import MooncakeWorkload
from papers.sarathi.serve_workload import ARXIV

LEVAL_QUESTIONS = 6  # about each document: five of six prompts find it cached
LEVAL_DOCUMENT_SHARE = 0.98
LEVAL_SIGMA = 0.5  # of the logarithm of a document's length
SIMULATED_PREFIXES = 8


@dataclass(frozen=True, slots=True)
class DataSet:
    """Means as v3 prints them. `shared`: the share of a prompt that is also the beginning of other
    prompts. `asked`: the number of questions about a document; 0 means few prefixes that are used
    throughout."""

    name: str
    input_tokens: int
    output_tokens: int
    shared: float = 0.0
    asked: int = 0

    def draw(self, num_requests: int, seed: int) -> MooncakeWorkload:
        """Draws Poisson arrivals, on average one per second."""
        rng = Random(seed)
        lengths = self._lengths(num_requests, rng)
        documents = self._documents(num_requests, rng)
        rows, at_s = [], 0.0
        names = _Names()
        for number in range(num_requests):
            at_s += rng.expovariate(1.0)
            document = documents[number]
            tokens, output = lengths[number if document is None or not self.asked else document]
            ids = names.of(tokens, document, self.shared)
            rows.append(TraceRow(at_s, tokens, output, ids))
        return MooncakeWorkload(self.name, rows, BLOCK_TOKENS, False, self._origin(rows))

    def _lengths(self, count: int, rng: Random) -> list[tuple[int, int]]:
        if self.name == "ArXiv":
            jobs = ARXIV.draw(count, rng.randrange(1 << 30))
            prompt = self.input_tokens * count / sum(job.prompt_tokens for job in jobs)
            output = self.output_tokens * count / sum(job.output_tokens for job in jobs)
            return [
                (round(prompt * job.prompt_tokens), max(round(output * job.output_tokens), 1))
                for job in jobs
            ]
        if not self.asked:
            return [(self.input_tokens, self.output_tokens)] * count
        drawn = [rng.lognormvariate(0.0, LEVAL_SIGMA) for _ in range(count)]
        # As many documents as are used have the printed mean.
        used = drawn[: -(-count // self.asked)]
        scale = self.input_tokens * len(used) / sum(used)
        return [(round(scale * each), self.output_tokens) for each in drawn]

    def _documents(self, count: int, rng: Random) -> list[int | None]:
        if not self.shared:
            return [None] * count
        if not self.asked:
            return [number % SIMULATED_PREFIXES for number in range(count)]
        found: list[int | None] = [number // self.asked for number in range(count)]
        rng.shuffle(found)
        return found

    def _origin(self, rows: list[TraceRow]) -> str:
        mean_input = sum(row.input_tokens for row in rows) / len(rows)
        mean_output = sum(row.output_tokens for row in rows) / len(rows)
        return (
            f"{self.name}: {len(rows):,} requests drawn to Table 2's means, input {mean_input:,.0f}"
            f" (printed {self.input_tokens:,}), output {mean_output:,.0f} ({self.output_tokens:,})"
        )


class _Names:
    """Assigns ids to blocks: equal ids to the shared blocks of a document's prompts, and new ids to
    other blocks."""

    def __init__(self) -> None:
        self._next = 0
        self._of: dict[int, list[int]] = {}

    def of(self, num_tokens: int, document: int | None, shared: float) -> tuple[int, ...]:
        count = -(-num_tokens // BLOCK_TOKENS)
        if document is None:
            return tuple(self._new(count))
        wanted = int(shared * num_tokens) // BLOCK_TOKENS
        kept = self._of.setdefault(document, [])
        kept += self._new(max(wanted - len(kept), 0))
        return (*kept[:wanted], *self._new(count - wanted))

    def _new(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


ARXIV_SUM = DataSet("ArXiv", 8088, 229)
L_EVAL = DataSet("L-Eval", 19_019, 72, LEVAL_DOCUMENT_SHARE, LEVAL_QUESTIONS)
SIMULATED = tuple(DataSet(f"{k}k", k * 1024, 512, 0.5) for k in (16, 32, 64, 128))
