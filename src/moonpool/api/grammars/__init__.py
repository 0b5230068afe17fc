"""Whether clients' grammars can be compiled and followed, tested in a separate process."""
