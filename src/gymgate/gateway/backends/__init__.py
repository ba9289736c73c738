"""Backends answer model calls: an HTTP server, a Python callable, recorded rollouts."""
