"""The metrics of `/metrics`: what there are, and their values."""
