"""Ports and servers on this machine, for benchmarks and tests."""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator


BUCKET = "bucket"


def free_port() -> int:
    """A port that nothing uses now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def bucket_server() -> Iterator[int]:
    """The port of a server of S3 with one bucket, `BUCKET`."""
    port = free_port()
    # What is put stays in memory.
    environment = {**os.environ, "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(2**30)}
    with subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as server:
        try:
            _make_bucket(server, port)
            yield port
        finally:
            server.terminate()


def _make_bucket(server: subprocess.Popen, port: int) -> None:
    for _ in range(600):
        assert server.poll() is None, "The server has ended."
        with contextlib.suppress(ConnectionError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("PUT", f"/{BUCKET}")
            assert connection.getresponse().status == 200
            return
        time.sleep(0.1)
    raise TimeoutError("The server has not begun.")
