"""The commands of this package, for `moonpool.commands`."""

COMMANDS = {
    "pool verify": ("moonpool_engine.cli.pool_disk", "verify", "Read an SSD folder and check it."),
    "pool serve": ("moonpool_engine.cli.pool_serve", "serve", "Keep vLLM's KVCache on this host."),
    "pool clear": ("moonpool_engine.cli.pool_disk", "clear", "Delete the blocks of an SSD folder."),
    "stage": ("moonpool_engine.cli.engine_process", "stage", ""),
    "rank": ("moonpool_engine.cli.engine_process", "rank", ""),
}
