"""Shared by the tests that start servers."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class QuietHandler(BaseHTTPRequestHandler):
    """Does not print the requests."""

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def served(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[str]:
    """The address of an HTTP server on loopback, at any free port by default."""
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextmanager
def mlflow_server(
    verb: str, *options: str, log: Path, environment: Mapping[str, str] | None = None, page: str = "health"
) -> Iterator[str]:
    """The address of `mlflow ui`, `mlflow server` or `mlflow models serve` on loopback, once a page of it answers."""
    port = free_port()
    command = [
        str(Path(sys.executable).with_name("mlflow")),
        *verb.split(),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *options,
    ]
    with log.open("w") as file:
        server = subprocess.Popen(
            command, env={**os.environ, **(environment or {})}, stdout=file, stderr=file, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180
        while not _answers(f"{address}/{page}"):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield address
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def _answers(address: str) -> bool:
    try:
        return urllib.request.urlopen(address, timeout=5).status == 200
    except OSError:
        return False


@contextmanager
def ceph_server(folder: Path, access_key: str, secret_key: str) -> Iterator[str]:
    """The address of Ceph's S3 gateway on loopback, over a store in memory; needs ceph-mon, -mgr, -osd and radosgw."""
    port = free_port()
    script = Path(__file__).with_name("storage") / "ceph.sh"
    command = [str(script), str(folder), str(free_port()), str(port), access_key, secret_key]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    try:
        assert server.stdout.readline() == "ready\n", (folder / "log" / "start").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stdin.close()
        server.wait(60)
