"""Contrastive pretraining."""
