"""Measures of face embeddings: verification, identification, templates, videos."""
