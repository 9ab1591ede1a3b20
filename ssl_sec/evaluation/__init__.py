"""Measures of the quality of a frozen encoder's features."""
