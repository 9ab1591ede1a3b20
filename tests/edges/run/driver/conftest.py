from ssl_sec.edges.composition.compose import compose
from ssl_sec.recipes.pretraining.config import PretrainConfig
from ssl_sec.settings import from_values


def pretrain_config(overrides: list[str]) -> PretrainConfig:
    return from_values(PretrainConfig, compose("pretrain", ["runtime=local", *overrides]))
