"""Whether clients' grammars can be followed, found out in a process of its own."""
