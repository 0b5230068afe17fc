"""Holds the modules that run in a vLLM to prove layouts there: a connector, planted faults, and a
driver."""
