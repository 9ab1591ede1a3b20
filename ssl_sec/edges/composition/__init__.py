"""From a command line and the files of `configs` to the values of a job."""
