"""Runs in NeMo Gym's own interpreter: gets an environment's data as NeMo Gym does and writes rows that are ready to run.

Imports nothing of ours but the fork server's file, by path. The order is a JSON object on standard input
(`gymgate.preparation.prepare` makes it); what happens is told as JSON lines on the descriptor that the command line
names (`told.py`).
"""
