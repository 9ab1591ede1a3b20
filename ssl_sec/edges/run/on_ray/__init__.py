"""A run on the workers of a Ray cluster."""
