"""Trainings by this package and by a peer, from the same weights on the same images: accuracy and time."""
