from ssl_sec.recipes.pretraining.config import PretrainConfig
from tests.jobs import configured


def pretrain_config(overrides: list[str]) -> PretrainConfig:
    return configured("pretrain", ["runtime=local", *overrides])
