"""A server of S3 on this machine, and a proxy that fails, delays and cuts as told."""

import collections
import contextlib
import dataclasses
import datetime
import http.client
import http.server
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import obstore.store
import zarr

from benchmarks.local import BUCKET, bucket_server


# Few repetitions, which begin soon.
RETRIES = {
    "max_retries": 3,
    "retry_timeout": datetime.timedelta(seconds=20),
    "backoff": {
        "init_backoff": datetime.timedelta(milliseconds=5),
        "max_backoff": datetime.timedelta(milliseconds=20),
        "base": 2,
    },
}


@dataclasses.dataclass(frozen=True)
class Request:
    """A request that a client has sent."""

    method: str
    path: str
    num_bytes: int

    @property
    def key(self) -> str:
        """What it asks for, without the bucket and the query."""
        return self.path.partition("?")[0].removeprefix(f"/{BUCKET}/")

    def is_of_chunk(self, method: str, chunk: str = "") -> bool:
        return self.method == method and f"/c/{chunk}" in self.key


# What becomes of a request: None to pass it on, or one of these.
#
# - `"500"` and other numbers: it is answered with this status, and not passed on.
# - `"delay"`: it is passed on late.
# - `"few"`: a listing has few keys, and the next ones follow.
# - `"cut"`: half of the answer comes.
# - `"lost"`: it is passed on, but no answer comes.
# - `"kill"`: the process that was told to the proxy is killed instead.
Fault = Callable[[Request], str | None]


class Proxy:
    """Passes requests to a server, unless `fault` says otherwise."""

    def __init__(self, port: int):
        self.server_port, self.fault = port, lambda request: None
        self.requests: list[Request] = []
        self.process: subprocess.Popen | None = None
        outer = self

        class Handler(_Handler):
            proxy = outer

        self.server = _Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """Settings of obstore for URLs."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }

    def store(self, prefix: str, **settings: object) -> zarr.storage.ObjectStore:
        """Objects below a prefix, as a store of zarr."""
        opened = obstore.store.S3Store(
            BUCKET,
            prefix=prefix,
            endpoint=f"http://127.0.0.1:{self.port}",
            region="us-east-1",
            access_key_id="test",
            secret_access_key="test",
            client_options={"allow_http": True, "timeout": "5s"},
            retry_config=RETRIES,
        )
        return zarr.storage.ObjectStore(opened, **settings)

    @contextlib.contextmanager
    def faulty(self, fault: Fault) -> Iterator[list[Request]]:
        """Has faults for a while; gives the requests of that time."""
        self.fault, self.requests = fault, []
        try:
            yield self.requests
        finally:
            self.fault = lambda request: None

    def objects(self, prefix: str) -> dict[str, bytes]:
        """The objects below a prefix, by key."""
        store = self.store(prefix).store
        return {
            x["path"]: bytes(store.get(x["path"]).bytes())
            for batch in store.list()
            for x in batch
        }


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


class _Handler(http.server.BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        # A client that is killed closes its connections.
        with contextlib.suppress(ConnectionError):
            super().handle()

    def do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, self.path, len(body))
        self.proxy.requests.append(request)
        fault = self.proxy.fault(request)
        if fault == "kill":
            assert self.proxy.process is not None
            self.proxy.process.send_signal(signal.SIGKILL)
            self.close_connection = True
            return
        if fault is not None and fault.isdigit():
            self._answer(int(fault), {}, b"", 0)
            return
        if fault == "delay":
            time.sleep(0.3)
        if fault == "few":
            self.path += "&max-keys=7"
        status, headers, data = self._passed_on(body)
        if fault == "lost":
            self.close_connection = True
            return
        self._answer(status, headers, data, len(data) // 2 if fault == "cut" else 0)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do

    def _passed_on(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.server_port)
        connection.request(self.command, self.path, body, dict(self.headers))
        response = connection.getresponse()
        data = response.read()
        connection.close()
        kept = {
            name: value
            for name, value in response.getheaders()
            if name.lower() not in ("connection", "transfer-encoding")
        }
        return response.status, kept, data

    def _answer(
        self, status: int, headers: dict[str, str], data: bytes, num_cut: int
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[: len(data) - num_cut])
        if num_cut:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True


def always(which: Callable[[Request], bool], what: str) -> Fault:
    """A fault of all requests of a kind."""
    return lambda request: what if which(request) else None


def first(which: Callable[[Request], bool], what: str, times: int = 2) -> Fault:
    """A fault of the first requests of a kind for each key."""
    counts: collections.Counter = collections.Counter()

    def fault(request: Request) -> str | None:
        if not which(request):
            return None
        counts[request.key] += 1
        return what if counts[request.key] <= times else None

    return fault


def at(number: int, what: str) -> Fault:
    """A fault of one request, by its number."""
    left = [number]

    def fault(request: Request) -> str | None:
        left[0] -= 1
        return what if left[0] < 0 else None

    return fault


@contextlib.contextmanager
def served() -> Iterator[Proxy]:
    """A proxy of a server with one bucket."""
    with bucket_server() as port:
        proxy = Proxy(port)
        yield proxy
        proxy.server.shutdown()
        proxy.server.server_close()
