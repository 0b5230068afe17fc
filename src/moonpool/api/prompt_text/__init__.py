"""The text of a prompt before it becomes a request."""
