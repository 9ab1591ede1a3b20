"""Verbs: each parses its configuration, builds, runs and reports."""
