"""Where endpoints come from: a file, DNS, or a Kubernetes API."""
