"""Requests that may have crashed an instance."""
