"""Front processes, which answer calls on one port and ask the head for decisions."""
