"""Fuzzes every reader of bytes from outside: `python -m tests.fuzz --inputs N`."""
