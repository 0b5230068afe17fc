"""moonpool's KVCache pool inside vLLM: the code that runs in the processes of a vLLM server."""
