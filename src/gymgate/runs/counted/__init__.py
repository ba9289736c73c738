"""Stored runs read as one, and what is counted of them: tasks, metrics, tokens and costs."""
