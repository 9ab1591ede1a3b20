"""A recipe that is added as a user would add one: this package and a row, see `test_registry.py`."""
