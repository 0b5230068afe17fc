"""The server tests of vLLM and llama.cpp against moonpool: `python -m benchmarks.peer_tests`.

The files of these test suites are fetched from the sdists that the projects publish, and run
unchanged. This repository keeps no part of them.
"""
