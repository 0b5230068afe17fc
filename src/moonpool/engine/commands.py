"""The commands of this package, for `moonpool.commands`."""

COMMANDS = {
    "pool verify": ("moonpool.cli.pool_disk", "verify", "Read an SSD folder and check it."),
    "pool clear": ("moonpool.cli.pool_disk", "clear", "Delete the blocks of an SSD folder."),
    "stage": ("moonpool.cli.engine_process", "stage", ""),
    "rank": ("moonpool.cli.engine_process", "rank", ""),
}
