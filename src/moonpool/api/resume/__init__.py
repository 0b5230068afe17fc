"""Streams that continue after the part that their clients have."""
