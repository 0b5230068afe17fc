"""Streams that go on after what their clients have."""
