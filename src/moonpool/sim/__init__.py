"""The simulator runs the scheduling code of the live cluster in virtual time."""
