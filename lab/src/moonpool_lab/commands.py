"""The commands of this package, for `moonpool.commands`."""

COMMANDS = {
    "demo": (
        "moonpool_lab.cli.demo",
        "demo",
        "Start a small cluster here and show what its KVCache saves.",
    ),
    "replay": ("moonpool_lab.cli.replay", "replay", "Send a trace to a live server."),
    "forecast": (
        "moonpool_lab.cli.forecast",
        "forecast",
        "Forecast how a server will answer a trace, then try it.",
    ),
    "compare": ("moonpool_lab.cli.replay", "compare", "Compare a simulation with a replay."),
    "trial": (
        "moonpool_lab.cli.trial",
        "trial",
        "Look for wrong answers of any server with OpenAI's API.",
    ),
    "oracle": (
        "moonpool_lab.cli.oracle",
        "oracle",
        "Compare policies with one that knows the whole trace.",
    ),
    "reproduce": (
        "moonpool_lab.cli.reproduce",
        "reproduce",
        "Reproduce a table or figure of the papers.",
    ),
    "profile": (
        "moonpool_lab.cli.profile",
        "profile",
        "Measure how long this machine takes for steps of a model.",
    ),
    "bench": ("moonpool_lab.cli.bench", "bench", "Run one of the benchmarks of this project."),
}
