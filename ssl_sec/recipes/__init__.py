"""Recipes: each trains or measures a network from a config, on one worker of any runtime."""
