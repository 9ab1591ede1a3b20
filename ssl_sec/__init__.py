"""Contrastive self-supervision with the Spherical Embedding Constraint, on one machine or a cluster."""

__version__ = "0.1.0"
