"""Ports, servers and the disk of this machine, for benchmarks and tests."""

import contextlib
import http.client
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple


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


# How often each way writes to disk.
_ROUNDS = 3


# Writes into a folder.
_Write = Callable[[pathlib.Path], None]


class WriteTimes(NamedTuple):
    """The seconds until all is on the disk, as medians; peak memory in bytes."""

    own: float
    plain: float
    resident: int


def write_in_turn(own: _Write, plain: _Write) -> WriteTimes:
    """The times of a way to write, and of writing as many bytes that are there.

    A first round counts for the memory only: what the machine has never used before
    takes several times as long to write to, also where it keeps files.
    """
    _until_synced(own)
    resident = peak_resident()
    _until_synced(plain)
    times = [(_until_synced(own), _until_synced(plain)) for _ in range(_ROUNDS)]
    return WriteTimes(*map(statistics.median, zip(*times, strict=True)), resident)


def _until_synced(write: _Write) -> float:
    with tempfile.TemporaryDirectory() as folder:
        os.sync()
        start = time.perf_counter()
        write(pathlib.Path(folder))
        os.sync()
        return time.perf_counter() - start


def peak_resident() -> int:
    """The peak resident memory of this process, in bytes.

    `resource.getrusage` includes the memory that the parent had when it started this
    process.
    """
    status = pathlib.Path("/proc/self/status").read_text()
    (line,) = [x for x in status.splitlines() if x.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])
