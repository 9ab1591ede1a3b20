import os

from ssl_sec.edges.run.on_ray.network import use_network_of


def test_gloo_uses_the_network_with_the_address_of_the_node_unless_one_is_chosen(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen")
    use_network_of("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    use_network_of("192.0.2.1")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    use_network_of("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
