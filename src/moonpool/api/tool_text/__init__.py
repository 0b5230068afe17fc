"""Formats in which models write tool calls, besides JSON."""
