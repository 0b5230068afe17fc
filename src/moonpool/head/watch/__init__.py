"""What a running cluster says of itself: metrics, logs of requests, traces, the live page."""
