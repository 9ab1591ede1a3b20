"""The commands of a checkout: `python -m jobs.<command>`, the same as `ssl-sec <command>`."""
