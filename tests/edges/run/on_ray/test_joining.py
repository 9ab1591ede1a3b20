"""Joining a cluster, without one."""

import contextlib
import signal
import socket
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import grpc
import pytest
import ray
from ray._common.tls_utils import generate_self_signed_tls_certs
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
    code = grpc.StatusCode.UNAUTHENTICATED if token else grpc.StatusCode.OK
    monkeypatch.setattr(joining, "answer_of", lambda address: code)


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


@pytest.mark.parametrize(
    ("joined", "address"),
    [("10.0.0.1:6379", "10.0.0.2:6379"), ("10.0.0.1:6379", "10.0.0.1:6380"), ("10.0.0.2:6379", "local")],
)
def test_an_address_is_refused_once_another_cluster_is_joined(joined, address, init, monkeypatch):
    this_process_has_joined(joined, monkeypatch)
    found = f"^runtime.address: found '{address}', but this process has joined the Ray cluster at {joined}; allowed: "
    with pytest.raises(ConfigError, match=found + "that one, none, or another one after ray.shutdown"):
        joining.connect(address)
    assert not init


@pytest.mark.parametrize("address", [None, "auto", "local", "10.0.0.1:6379", "localhost:6379", "127.0.1.1:6379"])
def test_the_cluster_that_this_process_has_joined_is_not_joined_again(address, init, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    this_process_has_joined("10.0.0.1:6379", monkeypatch)
    joining.connect(address)
    assert not init


def this_process_has_joined(cluster, monkeypatch):
    """Ray seems to be initialised, on a machine with the address 10.0.0.1."""
    context = SimpleNamespace(gcs_address=cluster)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")


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


class Answering(grpc.ServerInterceptor):
    """Answers every call by its code, or takes it if that is OK."""

    code = grpc.StatusCode.OK

    def intercept_service(self, continuation, details):
        def answer(request, context):
            if self.code != grpc.StatusCode.OK:
                context.abort(self.code, "no")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
def serve():
    """Starts a gRPC server on this machine, with TLS if there are credentials; returns its address."""
    with contextlib.ExitStack() as stack:

        def start(answering, credentials=None):
            server = grpc.server(ThreadPoolExecutor(1), interceptors=[answering])
            place = "127.0.0.1:0"
            port = server.add_secure_port(place, credentials) if credentials else server.add_insecure_port(place)
            server.start()
            stack.callback(lambda: server.stop(None).wait())
            return f"127.0.0.1:{port}"

        yield start


def test_a_server_tells_by_its_refusal_that_it_requires_a_token(serve, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which Ray does not use either
    answering = Answering()
    address = serve(answering)
    for answering.code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.OK):
        assert joining.answer_of(address) == answering.code
    assert joining.answer_of("auto") == grpc.StatusCode.OK


@pytest.fixture
def certificates(tmp_path, monkeypatch):
    """A certificate of this machine in the variables of Ray, without RAY_USE_TLS; the credentials of a server."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's
        certificate, key = generate_self_signed_tls_certs()
    for name, text in {"SERVER_CERT": certificate, "CA_CERT": certificate, "SERVER_KEY": key}.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setenv(f"RAY_TLS_{name}", str(tmp_path / name))
    pair = (key.encode(), certificate.encode())
    return grpc.ssl_server_credentials([pair], certificate.encode(), require_client_auth=True)


@pytest.fixture
def quickly(monkeypatch):
    monkeypatch.setattr(joining, "_ASKED_AGAIN_S", 0.0)


def test_a_cluster_that_closes_a_connection_is_asked_again(address, init, quickly, monkeypatch):
    codes = iter([grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE, *2 * [grpc.StatusCode.OK]])
    monkeypatch.setattr(joining, "answer_of", lambda address: next(codes))
    joining.connect(address)
    assert init == [address]


@pytest.mark.parametrize("has_tls", [False, True])
def test_a_cluster_is_asked_with_the_encryption_of_ray(
    has_tls, serve, certificates, init, address, quickly, monkeypatch
):
    """Ray tries to join one with another encryption for ever."""
    cluster = serve(Answering(), certificates if has_tls else None).replace("127.0.0.1", "localhost")
    monkeypatch.setenv("RAY_USE_TLS", str(int(has_tls)))
    joining.connect(cluster)
    assert init == [cluster]
    monkeypatch.setenv("RAY_USE_TLS", str(int(not has_tls)))
    found = f"^runtime.address: found '{cluster}', where no Ray cluster answers, or one with another setting of TLS; "
    with pytest.raises(ConfigError, match=found + (".*needs RAY_USE_TLS=1" if has_tls else ".*RAY_USE_TLS is set")):
        joining.connect(cluster)
    assert init == [cluster]


def test_missing_certificates_are_one_line(init, address, monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "true")
    for name in ("SERVER_CERT", "CA_CERT", "SERVER_KEY"):
        monkeypatch.setenv(f"RAY_TLS_{name}", f"/nosuch/{name}")
    with pytest.raises(ConfigError, match=r"^RAY_USE_TLS: .*No such file or directory: '/nosuch/SERVER_CERT'$"):
        joining.connect(address)
    monkeypatch.delenv("RAY_TLS_CA_CERT")
    with pytest.raises(ConfigError, match="^RAY_USE_TLS: .*RAY_TLS_CA_CERT must also be set"):
        joining.connect(address)


def test_another_server_is_no_cluster(init, serve, quickly, monkeypatch):
    """Such as those of the head's dashboard, which speaks HTTP/1, and of Ray Client."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    client = Answering()
    client.code = grpc.StatusCode.UNIMPLEMENTED
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            for other in (f"127.0.0.1:{server.server_port}", serve(client)):
                with pytest.raises(
                    ConfigError, match=f"^runtime.address: found '{other}', where no Ray cluster answers"
                ):
                    joining.connect(other)
        finally:
            server.shutdown()
            thread.join()
    assert not init


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
