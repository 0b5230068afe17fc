"""Writes the report of a simulation as one self-contained page with charts."""
