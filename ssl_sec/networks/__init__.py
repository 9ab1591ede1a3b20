"""Encoders: images in [0, 1] -> features."""

from ssl_sec.networks.backbones.bn_inception import bn_inception
from ssl_sec.networks.backbones.googlenet import googlenet, published_googlenet
from ssl_sec.networks.backbones.ir import ir
from ssl_sec.networks.backbones.light_cnn import light_cnn
from ssl_sec.networks.backbones.resnet import resnet
from ssl_sec.networks.backbones.sphereface import sphereface_net
from ssl_sec.networks.backbones.timm import timm_backbone
from ssl_sec.networks.encoder import Embedded, Encoder, Network
from ssl_sec.networks.frozen import freeze_batch_norm
from ssl_sec.networks.weights import load_head_weights, load_weights, save_weights

__all__ = [
    "Embedded",
    "Encoder",
    "Network",
    "bn_inception",
    "freeze_batch_norm",
    "googlenet",
    "ir",
    "light_cnn",
    "load_head_weights",
    "load_weights",
    "published_googlenet",
    "resnet",
    "save_weights",
    "sphereface_net",
    "timm_backbone",
]
