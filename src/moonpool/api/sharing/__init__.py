"""Divides a server's resources among its clients: buffers that they fill, and memory for their
bodies."""
