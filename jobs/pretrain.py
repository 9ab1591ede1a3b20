"""Contrastive pretraining: python -m jobs.pretrain experiment=cifar10_sec_100 [probe.enabled=true]."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("pretrain")
