"""The folder of a run: what it holds, what it is called, how it is found."""
