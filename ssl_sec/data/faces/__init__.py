"""Faces: pairs and lists that verification is measured on, record files, alignment."""
