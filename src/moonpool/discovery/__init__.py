"""Which servers there are now: read from a file or from DNS, again and again."""
