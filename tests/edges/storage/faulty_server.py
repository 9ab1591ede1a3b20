"""A proxy before an S3 server that delays, fails and cuts requests as networks and providers do."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"


class Faults:
    """What goes wrong.

    Attributes:
        latency_s: before each answer.
        failing: the share of requests that fail, half with 500 and half with 503.
        cut: the share of uploads whose connection is cut after half of their body.
        is_away: whether connections are closed without an answer.
        refused: status, code and message of the answer to all writes; None to take them.
        counts: how often each happened.
    """

    def __init__(self, seed: int = 0) -> None:
        self.latency_s = 0.0
        self.failing = 0.0
        self.cut = 0.0
        self.is_away = False
        self.refused: tuple[int, str, str] | None = None
        self.counts = dict.fromkeys(("requests", "failed", "cut", "away", "refused"), 0)
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def draw(self, method: str) -> str:
        """What happens to a request; an empty string for nothing."""
        with self._lock:
            self.counts["requests"] += 1
            chance, found = self._random.random(), ""
            if self.is_away:
                found = "away"
            elif self.refused is not None and method in ("PUT", "POST"):
                found = "refused"
            elif method == "PUT" and chance < self.cut:
                found = "cut"
            elif chance > 1 - self.failing:
                found = "failed"
            if found:
                self.counts[found] += 1
            return found


@contextmanager
def faulty(address: str) -> Iterator[tuple[str, Faults]]:
    """The address of a proxy before the server at an address, and its faults."""
    server_address, faults = urlsplit(address).netloc, Faults()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format, *arguments) -> None:
            pass

        def forward(self) -> None:
            time.sleep(faults.latency_s)
            fault = faults.draw(self.command)
            length = int(self.headers.get("Content-Length") or 0)
            if fault in ("away", "cut"):
                self.rfile.read(length // 2)
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            body = self.rfile.read(length) if length else self.chunks()
            if fault:
                answer = {500: "InternalError", 503: "SlowDown"}
                status = 500 if faults.counts["failed"] % 2 else 503
                refused = faults.refused or (status, answer[status], "")
                status, code, message = refused if fault == "refused" else (status, answer[status], "try again")
                self.answer(
                    status, {"Content-Type": "application/xml"}, _ERROR.format(code=code, message=message).encode()
                )
                return
            server = HTTPConnection(server_address, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "transfer-encoding"}
            server.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
            found = server.getresponse()
            content = found.read()
            self.answer(found.status, dict(found.getheaders()), content)
            server.close()

        def chunks(self) -> bytes:
            body = b""
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return body
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return body

        def answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                    self.send_header(name, value)
            length = headers.get("Content-Length", str(len(content))) if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request, client_address) -> None:
            pass  # clients that give up

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", faults
    finally:
        server.shutdown()
        server.server_close()
