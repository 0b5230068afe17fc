"""moonpool's KVCache pool inside vLLM: what runs in the processes of a vLLM server."""
