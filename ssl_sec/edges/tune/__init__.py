"""Searches over keys of a pretraining, by Ray Tune."""
