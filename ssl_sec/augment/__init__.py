"""Augmentation on the device: which views a step has, and the one launch that makes them on a GPU."""
