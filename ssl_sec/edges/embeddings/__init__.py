"""Embeddings of data sets by trained networks."""
