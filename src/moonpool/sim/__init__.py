"""The simulator: a second driver of the machines that serve, in virtual time."""
