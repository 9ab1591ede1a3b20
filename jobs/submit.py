"""Sends a job to a Ray cluster: python -m jobs.submit pretrain experiment=cifar10_sec_100 [--then probe] [--follow]."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("submit")
