"""Face recognition."""
