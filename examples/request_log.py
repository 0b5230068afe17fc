"""Replays the log of one's own service in simulated time. Argument: a log, such as requests.log.

The log has one JSON object per line with the time, the prompt and the tokens of the answer. The
command line takes the same format: moonpool simulate --trace FILE --trace-format request_log:Log
"""

import json
import sys
from datetime import datetime

import moonpool

BLOCK = 16  # words here; count tokens with your model's tokenizer


class Log:
    """A parser of lines. Equal beginnings of prompts get equal hash ids, so the cache can hit."""

    block_tokens = BLOCK

    def __init__(self):
        self.ids = {}

    def parse(self, line):
        """Returns (time, tokens of the prompt, tokens of the answer, hash ids); None says to skip
        it."""
        entry = json.loads(line)
        if entry["status"] != 200:
            return None
        words = entry["prompt"].split()
        beginnings = [" ".join(words[: end + BLOCK]) for end in range(0, len(words), BLOCK)]
        hashes = [self.ids.setdefault(text, len(self.ids)) for text in beginnings]
        at_s = datetime.fromisoformat(entry["time"]).timestamp()
        return at_s, len(words), entry["completion_tokens"], hashes


if __name__ == "__main__":
    trace = moonpool.read_trace(sys.argv[1], trace_format=f"{__name__}:Log")
    run = moonpool.simulate(trace, prefill=1, decode=1, config={"pool": {"block_tokens": 16}})
    print(trace)
    print(f"{run.summary['cache']['hit_tokens']} prompt tokens would come from the cache")
    run.requests.to_csv("requests.csv")
    print("see requests.csv")
