"""What a running cluster reports about itself: metrics, logs of requests, traces, the live page."""
