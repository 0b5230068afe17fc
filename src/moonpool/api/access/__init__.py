"""Decides who may call a server, and keeps other callers out."""
