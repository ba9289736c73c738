"""Runs in NeMo Gym's interpreter: gets an environment's data as NeMo Gym does, and writes rows that are ready to run.

The order is a JSON object on standard input
(`gymgate.gym.preparation.order` makes it). Events go to standard output (`events.py`), everything else to standard error.
"""
