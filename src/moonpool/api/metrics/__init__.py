"""The metrics of `/metrics`: their definitions and their values."""
