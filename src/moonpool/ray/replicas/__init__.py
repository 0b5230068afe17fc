"""The Conductor over the replicas of a Serve deployment; pure, so it needs no Ray."""
