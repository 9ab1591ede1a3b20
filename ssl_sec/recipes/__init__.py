"""Recipes: what is trained or measured, from a config, on one worker of any runtime."""
