"""Speed and memory of the package beside other libraries; each module is a command that writes to `results/`."""
