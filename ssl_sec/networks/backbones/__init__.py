"""Backbones: each returns the network and its number of features."""
