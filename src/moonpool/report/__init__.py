"""A simulation as one page to read: drawn here, self-contained, without scripts."""
