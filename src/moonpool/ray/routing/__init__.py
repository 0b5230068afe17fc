"""The Conductor as the request router of Ray Serve."""
