"""Exports encoders to files that other programs read."""
