"""The server tests of vLLM and llama.cpp against moonpool: `python -m benchmarks.peer_tests`.

Their files are fetched from the sdists that the projects publish, and run unchanged. Nothing of
them is kept in this repository.
"""
