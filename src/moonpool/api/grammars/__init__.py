"""Tests in a separate process whether clients' grammars can be compiled and followed."""
