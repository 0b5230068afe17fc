"""The report of a simulation: one self-contained page with charts."""
