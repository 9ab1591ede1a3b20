"""Joining a cluster, without one."""

import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import ray
from ray._private.utils import validate_socket_filepath

from ssl_sec.edges.run import signals
from ssl_sec.edges.run.on_ray import joining
from ssl_sec.edges.run.signals import handled
from ssl_sec.errors import ConfigError, UserError


@pytest.fixture
def address(tmp_path, monkeypatch):
    """The address of a server that `ray start` seems to have started here."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        yield address


@pytest.fixture
def init(monkeypatch):
    """The addresses that Ray joins."""
    addresses = []
    monkeypatch.setattr(ray, "init", lambda address, **_: addresses.append(address))
    return addresses


def requires(monkeypatch, token):
    monkeypatch.setattr(joining, "_requires_token", lambda address: token)


@pytest.mark.parametrize(
    ("is_found", "token", "is_given"), [(True, True, True), (True, False, False), (False, False, False)]
)
def test_a_cluster_that_is_found_gets_the_users_token_if_it_requires_one(
    address, init, is_found, token, is_given, monkeypatch
):
    requires(monkeypatch, token)
    given = []
    monkeypatch.setattr(joining, "maybe_enable_token_auth_if_token_available", lambda **_: given.append(1) or True)
    joining.connect(None if is_found else address)
    assert init == [address] and bool(given) == is_given


@pytest.mark.parametrize(("is_found", "key"), [(True, "RAY_ADDRESS"), (False, "runtime.address")])
def test_a_missing_token_is_one_line(address, init, is_found, key, monkeypatch):
    """The user's token is not sent to an address that was given."""
    requires(monkeypatch, True)
    monkeypatch.setattr(joining, "maybe_enable_token_auth_if_token_available", lambda **_: False)
    with pytest.raises(ConfigError, match=f"^{key}: the Ray cluster at {address} requires the token .*=token, and by "):
        joining.connect(None if is_found else address)
    assert not init


@pytest.mark.parametrize(
    ("cause", "found"),
    [
        (
            "...\nray.exceptions.AuthenticationError: no",
            "requires the token that ",
        ),  # Ray's own error is in the text alone
        ("closed", "cannot be joined: no connection$"),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_one_line(address, cause, found, monkeypatch):
    def refuse(**_):
        raise ConnectionError("no\nconnection") from RuntimeError(cause)

    requires(monkeypatch, False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ConfigError, match=f"^runtime.address: the Ray cluster at {address} {found}") as raised:
        joining.connect(address)
    assert "\n" not in str(raised.value)


def test_a_sigterm_while_ray_starts_interrupts(address, monkeypatch):
    """Ray's handler would end the job with exit code 15 and no word."""

    def init(**options):
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray's
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ray, "init", init)
    requires(monkeypatch, False)
    before = signal.getsignal(signal.SIGTERM)
    with handled(signals.interrupt), pytest.raises(KeyboardInterrupt):
        ours = signal.getsignal(signal.SIGTERM)
        try:
            joining.connect(address)
        finally:
            assert signal.getsignal(signal.SIGTERM) is ours
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_server_tells_by_its_refusal_that_it_requires_a_token():
    class Refusing(grpc.ServerInterceptor):
        def intercept_service(self, continuation, details):
            code = grpc.StatusCode.UNAUTHENTICATED if "token" in names else grpc.StatusCode.UNIMPLEMENTED
            return grpc.unary_unary_rpc_method_handler(lambda _, context: context.abort(code, "no"))

    names = ["token"]
    server = grpc.server(ThreadPoolExecutor(1), interceptors=[Refusing()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    assert joining._requires_token(address)
    names.clear()
    assert not joining._requires_token(address) and not joining._requires_token("auto")
    server.stop(None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"TMPDIR": "/scratch/7"}, None),
        ({"TMPDIR": "/" + 37 * "t"}, "/tmp/ray"),
        ({"TMPDIR": "/" + 37 * "t", "RAY_TMPDIR": "/" + 37 * "r"}, None),
    ],
)
def test_the_paths_of_rays_sockets_are_short(given, expected, monkeypatch):
    """A path that the user has given to Ray is left to Ray."""
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda _temp_dir, **_: found.append(_temp_dir))
    joining.connect("local")
    assert found == [expected]


def test_a_path_that_is_too_long_for_ray_is_one_line_with_advice(monkeypatch):
    def init(**_):
        validate_socket_filepath(f"/{107 * 's'}")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(UserError, match=r"^Ray could not start .*; give RAY_TMPDIR=<a folder with a shorter path>$"):
        joining.connect("local")
