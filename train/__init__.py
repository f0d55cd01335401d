"""Muster's training plane: one job, any number of ranks, exact numbers."""

__version__ = "0.1.0"
