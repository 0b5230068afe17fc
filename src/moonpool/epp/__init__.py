"""The endpoint picker of the Gateway API inference extension: Envoy asks it, over gRPC, where each
request goes. The Conductor decides, as for `serve --vllm`; the bytes go through Envoy."""
