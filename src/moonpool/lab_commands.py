"""The commands of this package, for `moonpool.commands`."""

COMMANDS = {
    "demo": ("moonpool.cli.demo", "demo", "Show the main job end to end on a local cluster."),
    "replay": ("moonpool.cli.replay", "replay", "Send a trace to a live server."),
    "compare": ("moonpool.cli.replay", "compare", "Compare a simulation with a replay."),
    "trial": ("moonpool.cli.trial", "trial", "Look for wrong answers of any OpenAI server."),
    "oracle": ("moonpool.cli.oracle", "oracle", "Compare policies with knowing the future."),
    "reproduce": (
        "moonpool.cli.reproduce",
        "reproduce",
        "Reproduce a table or figure of the papers.",
    ),
    "profile": ("moonpool.cli.profile", "profile", "Measure this machine and fit the cost model."),
    "bench": ("moonpool.cli.bench", "bench", "Run a benchmark against a limit or a peer."),
}
