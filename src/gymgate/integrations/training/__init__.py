"""Shared by the integrations of trainers: rollouts and their metrics, rows drawn by weight. Imports no trainer."""
