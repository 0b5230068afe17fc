"""The words of a report, for whoever has not met them before."""

from __future__ import annotations

from html import escape

TERMS = (
    ("TTFT", "Time to first token: from a request's arrival to the first word of its answer."),
    (
        "TBT",
        (
            "Time between tokens of an answer. A request's own TBT is the mean of the longest "
            "tenth of its pauses."
        ),
    ),
    (
        "SLO",
        (
            "Service level objective: the TTFT and TBT promised to each request. A request within "
            "both is effective; effective requests per second are the goodput."
        ),
    ),
    (
        "Prefill",
        "Computing a prompt, all its tokens at once; it ends with the answer's first token.",
    ),
    ("Decode", "Writing the rest of the answer, one token per step for many requests together."),
    (
        "KVCache",
        (
            "What the model remembers of tokens it has read. Prompts that begin alike share it, so "
            "it is kept, in blocks of tokens, in the DRAM of all instances: the pool."
        ),
    ),
    ("Hit", "A prompt's block that was in the pool already and did not have to be computed."),
    ("Fetch", "Copying cached blocks over the network to the instance that needs them."),
    (
        "Instance",
        (
            "One or more machines that run one copy of the model, for prefill, decode, or both "
            "(mixed)."
        ),
    ),
    (
        "Conductor",
        (
            "Chooses for each request where it is prefilled and decoded, from predictions of both, "
            "or refuses it before it costs anything."
        ),
    ),
    ("Load", "Predicted latency over promised latency; above 1 the promise cannot be kept."),
    (
        "Stages",
        (
            "Placement: until it was given to instances. Queue and fetch: until its prefill began. "
            "Prefill: until its prompt was computed. Handover: until the decode instance took over "
            "and the first token was sent. Decode: until the answer ended."
        ),
    ),
    ("Bubble", "Idle time of an instance between two of its steps."),
    ("p50, p90, p99", "What 50, 90, 99 of a hundred values do not exceed; p50 is the median."),
)


def glossary() -> str:
    lines = [f"<div><dt>{escape(word)}</dt><dd>{escape(text)}</dd></div>" for word, text in TERMS]
    return f'<dl class="glossary">{"".join(lines)}</dl>'
