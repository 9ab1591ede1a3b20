"""Augmentation on the device: the views of a step, and a kernel that makes them in one launch on a GPU."""
