"""Faces: pairs and lists for verification, record files, alignment."""
