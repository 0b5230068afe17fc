"""The Conductor's event log, and its replay decision for decision."""
