"""Runs the tests against other programs, and writes docs/compatibility.md from the results."""
