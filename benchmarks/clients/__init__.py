"""Today's clients against a running server: `python -m benchmarks.clients`."""
