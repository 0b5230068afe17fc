"""What clients of a server share: buffers that they fill, and room for their bodies."""
