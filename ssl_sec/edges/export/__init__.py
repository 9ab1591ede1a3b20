"""Encoders in files that others read."""
