"""Joins a Ray cluster, or starts one on this machine."""

import contextlib
import ipaddress
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import grpc
import ray
from ray._common.tls_utils import load_certs_from_env
from ray._common.utils import get_default_ray_temp_dir

# As `ray.init` does where it looks for a cluster itself.
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.ray_constants import GLOBAL_GRPC_OPTIONS
from ray._private.ray_logging import stderr_deduplicator
from ray.exceptions import AuthenticationError
from ray.job_config import JobConfig

from ssl_sec.edges.environment import cluster_address, require_files_for_ray
from ssl_sec.errors import ConfigError, UserError, first_line

logger = logging.getLogger("ssl_sec")

_ANSWER_WITHIN_S = 10.0
_ASKED_AGAIN_S = 1.0
# No HTTP/2 or another encryption, and another gRPC service, such as Ray's own at the port of its client.
_NOT_RAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED)
# Longest path of Ray's folder: the names of its sockets there add 66 bytes, with a process of seven digits, and Linux
# allows 107.
_LONGEST_FOLDER = 41
_TOO_LONG = "AF_UNIX path length"
# Ray warns of an actor of its own at each start of Ray Train.
_HARMLESS = re.compile(r"Actor with class name: 'PreemptionWatcher' .* has constructor arguments in the object store")


def connect(address: str | None, name: str | None = None, **resources: Any) -> None:
    """Joins a cluster, or starts one on this machine, unless this process has done so already.

    Args:
        address: address of the cluster; None for that of `find_cluster`, or a new one; "local" for a new one.
        name: name of this job in Ray's dashboard.
        resources: number of CPUs and GPUs of a cluster that is started; those of this machine by default.

    Raises:
        ConfigError: if there is no cluster at the address, it cannot be joined, or this process has joined another.
        UserError: if Ray cannot start on this machine.
    """
    if ray.is_initialized():
        _require_joined(address)
        return
    require_files_for_ray()
    key = "runtime.address" if address else "RAY_ADDRESS"
    is_found = address is None and not os.environ.get("RAY_ADDRESS")
    address = cluster_address(address)
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Ray gives its workers a low priority, so that they wait for its own services if workers use all cores. It reads
    # this variable when it starts nodes.
    os.environ.setdefault("RAY_worker_niceness", "0")
    if address is not None and (error := refusal(address)) is not None:  # Ray itself retries for minutes
        raise ConfigError(
            f"{key}: no Ray cluster at {address} ({error.strerror or error}); start one with "
            "`ray start --head`, or leave the address out to start Ray here"
        ) from error
    if address is not None:
        answer = _answer_of_ray(key, address)
        if not gets_token(answer, is_found=is_found):
            raise ConfigError(_needs_token(key, address))
    logger.info("starting Ray on this machine" if address is None else "connecting to the Ray cluster")
    stderr_deduplicator.skip_re = stderr_deduplicator.skip_re or _HARMLESS
    with own_signal_handlers(), _own_process_group(), _start_reported(key, address):
        ray.init(
            address=address or "local",  # without an address Ray also tries clusters that ended, for minutes
            logging_level=logging.ERROR,
            # Messages of workers come through the run's folder. If we start Ray, its other output stays in its log
            # files; the output of a cluster is shown, as it may explain why nothing starts.
            log_to_driver=address is not None,
            job_config=JobConfig(metadata={} if name is None else {"job_name": name}),
            **({"_temp_dir": _short_folder(), **resources} if address is None else {}),
        )


def _require_joined(address: str | None) -> None:
    """Refuses the address of another cluster than the one that this process has joined."""
    joined = ray.get_runtime_context().gcs_address
    if address is None or address == "auto":
        return
    here = f"localhost:{joined.rpartition(':')[2]}"
    if _places(here if address == "local" else address).isdisjoint(_places(joined)):
        raise ConfigError(
            f"runtime.address: found {address!r}, but this process has joined the Ray cluster at {joined}; allowed: "
            "that one, none, or another one after ray.shutdown()"
        )


def _places(address: str) -> set[tuple[str, str]]:
    """The IP addresses and the port of host:port; this machine's loopback has the one of its Ray, too."""
    host, _, port = address.rpartition(":")
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return {(host, port)}
    if any(ipaddress.ip_address(each).is_loopback for each in found):
        found.add(ray.util.get_node_ip_address())
    return {(each, port) for each in found}


def _short_folder() -> str | None:
    """A folder for Ray's files, if the path of the one that TMPDIR gives is too long; None leaves the choice to Ray."""
    if "RAY_TMPDIR" in os.environ or len(os.fsencode(get_default_ray_temp_dir())) <= _LONGEST_FOLDER:
        return None
    logger.info("Ray's files are in /tmp/ray: the path in TMPDIR is too long for its sockets; RAY_TMPDIR gives another")
    return "/tmp/ray"


@contextlib.contextmanager
def _own_process_group() -> Iterator[None]:
    """Puts the processes that are started into a group of their own.

    A signal to the group of the job, as a closed terminal and `timeout` send it, would end Ray before the workers have
    saved the state. A process that leads a session keeps its group.
    """
    group = os.getpgrp()
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.setpgid(0, group)


@contextlib.contextmanager
def own_signal_handlers() -> Iterator[None]:
    """Restores the signal handlers that Ray replaces; with Ray's, a SIGTERM would end the driver at once.

    Raises:
        KeyboardInterrupt: for a SIGTERM in the block.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SystemExit:  # of Ray's handler
        raise KeyboardInterrupt from None
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if callable(handler):
                    signal.signal(number, handler)


@contextlib.contextmanager
def _start_reported(key: str, address: str | None) -> Iterator[None]:
    """Reports in one line that Ray cannot start or be joined; it raises errors of any kind.

    Args:
        key: what names the cluster.
        address: the address of the cluster; None if one is started here.
    """
    try:
        yield
    except Exception as error:
        if address is None:
            advice = "the same command can be run again, since a busy machine may need longer than Ray waits"
            if _TOO_LONG in str(error):
                advice = "give RAY_TMPDIR=<a folder with a shorter path>"
            raise UserError(
                f"Ray could not start on this machine ({first_line(error).rstrip('.')}); {advice}"
            ) from error
        if isinstance(error, AuthenticationError) or AuthenticationError.__name__ in str(error.__cause__):
            raise ConfigError(_needs_token(key, address)) from error
        if isinstance(error, ConnectionError | RuntimeError):  # another version of Ray, or a cluster that has ended
            reason = " ".join(str(error).split())
            raise ConfigError(f"{key}: the Ray cluster at {address} cannot be joined: {reason}") from error
        raise


def gets_token(answer: grpc.StatusCode, *, is_found: bool) -> bool:
    """Whether a cluster gets a token if it requires one.

    `ray start` requires this user's token where there is one. As by Ray, it is given only to a cluster that was found
    on this machine: another one gets the token that `RAY_AUTH_MODE=token` asks for.

    Args:
        answer: the cluster's answer to a call without a token.
        is_found: whether nobody has given its address.
    """
    if os.environ.get("RAY_AUTH_MODE") == "token" or answer != grpc.StatusCode.UNAUTHENTICATED:
        return True
    return is_found and maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _needs_token(key: str, address: str) -> str:
    return (
        f"{key}: the Ray cluster at {address} requires the token that it was started with; give it by "
        "RAY_AUTH_MODE=token, and by RAY_AUTH_TOKEN_PATH=<file> if it is not in ~/.ray/auth_token"
    )


def _answer_of_ray(key: str, address: str) -> grpc.StatusCode:
    """The answer of a cluster; it is asked more than once, since a busy one may close a connection.

    Raises:
        ConfigError: no cluster answers; Ray itself would try to join for ever.
    """
    for wait_s in (_ASKED_AGAIN_S, _ASKED_AGAIN_S, 0.0):
        if (answer := answer_of(address)) not in _NOT_RAY:
            return answer
        time.sleep(wait_s)
    raise ConfigError(
        f"{key}: found {address!r}, where no Ray cluster answers, or one with another setting of TLS; allowed: "
        f"<head>:6379, or the port that `ray start --head` was given by --port; {_tls_settings()}"
    )


def answer_of(address: str) -> grpc.StatusCode:
    """How a cluster answers a call without a token; Ray itself would repeat one that is refused.

    Args:
        address: host:port; others, which only Ray understands, are not called.

    Raises:
        ConfigError: TLS is to be used, and there is no certificate.
    """
    if "://" in address or not address.rpartition(":")[2].isdigit():
        return grpc.StatusCode.OK
    with _channel(address) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(b"", timeout=_ANSWER_WITHIN_S)
        except grpc.RpcError as error:
            return cast(grpc.Call, error).code()
    return grpc.StatusCode.OK


def _channel(address: str) -> grpc.Channel:
    """A connection with the same encryption as Ray's own, and without a proxy."""
    if not _uses_tls():
        return grpc.insecure_channel(address, GLOBAL_GRPC_OPTIONS)
    try:
        chain, key, root = load_certs_from_env()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"RAY_USE_TLS: {first_line(error)}") from error
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(root, key, chain), GLOBAL_GRPC_OPTIONS)


def _uses_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _tls_settings() -> str:
    """What the environment says about TLS, and what the other kind of cluster needs."""
    if _uses_tls():
        return "RAY_USE_TLS is set, so the cluster must use TLS, with a certificate signed by RAY_TLS_CA_CERT"
    return "one with TLS needs RAY_USE_TLS=1, RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT"


def refusal(address: str) -> OSError | None:
    """Why nothing can be reached at an address of the form host:port; None if something can."""
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host, int(port)), timeout=_ANSWER_WITHIN_S).close()
    except OSError as error:
        return error
    return None
