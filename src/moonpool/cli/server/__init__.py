"""Commands that query a running server: its address, key and certificate, and calls to it."""
