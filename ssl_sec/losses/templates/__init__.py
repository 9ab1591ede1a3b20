"""Losses with something for each class: learned templates, or centres that follow the batches."""
