"""Optimisers of a run: their groups of parameters, and their settings."""
