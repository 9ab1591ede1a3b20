"""The network by which the workers of several nodes reach each other."""

import os

import psutil


def use_network_of(address: str) -> None:
    """Makes gloo use the network interface with this address, unless the user has chosen one.

    By default it takes the address of the machine's own name, which other machines cannot reach where /etc/hosts gives
    127.0.1.1 for it, as on Debian.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
