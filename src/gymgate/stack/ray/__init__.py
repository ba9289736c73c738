"""Stacks on the nodes of a Ray cluster: what runs in the caller's process, and in Ray's actors on the nodes."""
