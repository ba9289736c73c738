"""Run NVIDIA NeMo Gym environments from any eval or RL SDK."""

__version__ = "0.1.0"
