"""Commands that show a running cluster: `status` and `top`."""
