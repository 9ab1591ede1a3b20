"""The folder of a run: its content, its name, and how it is found."""
