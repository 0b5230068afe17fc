"""What clients of a server share: buffers that they fill, and memory for their bodies."""
