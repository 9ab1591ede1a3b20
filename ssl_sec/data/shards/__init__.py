"""Sets in files of many images, local or remote: tar shards, and reading by blocks without laying a set out."""
