"""Front processes: they answer calls on one port, and ask the head, which decides."""
