"""Trials of requests that may have crashed an instance."""
