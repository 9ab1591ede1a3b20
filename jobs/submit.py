"""Sends a job to a Ray cluster: python -m jobs.submit pretrain experiment=cifar10_sec_100 [--then probe] [--follow]."""

import sys

from ssl_sec.edges.command_line import exit_code_of
from ssl_sec.edges.submit_command import submit

if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: submit(sys.argv[1:])))
