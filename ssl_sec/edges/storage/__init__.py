"""Run folders in object storage: each machine works in a folder of its own, and the bucket holds what must last."""
