"""A run under way: prepared, run on a stack, written to its directory, and followed."""
