"""Commands that ask a running server: its address, key and certificate, and calls of it."""
