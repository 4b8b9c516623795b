#!/usr/bin/env bash
# An array of zarr in a bucket that does not exist any more reads as zeros, without an error.
#
# Expected: an error, as for any other request that a server refuses: the bucket is missing (status
# 404, code NoSuchBucket), and not a chunk (NoSuchKey).
# Seen: zarr 3.4.2 with obstore 0.12.1 takes both for a chunk that nobody has written, and fills in
# `fill_value`. A status of 403 is an error. With `config={"read_missing_chunks": False}`, it raises
# a ChunkNotFoundError, which zarr 3.1.3 does not know.
# Guessed before: an error of obstore.
# Source: the libraries themselves; that missing chunks are filled in is zarr's format, and
# https://github.com/zarr-developers/zarr-python/issues/486 asks how to prevent it.
#
# Exits with 0 as long as this is so. It needs Python 3.12 or newer.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet zarr==3.4.2 obstore==0.12.1 "moto[s3]==5.2.5" \
    flask==3.1.3 flask-cors==6.0.2
cat >"$folder/program.py" <<'PROGRAM'
import http.client
import socket
import subprocess
import sys
import time

import obstore.store
import zarr


def request(method, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request(method, path)
    return connection.getresponse().status


with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
server = subprocess.Popen(
    [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
)
try:
    for _ in range(300):
        try:
            assert request("PUT", "/bucket") == 200
            break
        except ConnectionError:
            time.sleep(0.1)
    bucket = obstore.store.S3Store(
        "bucket",
        endpoint=f"http://127.0.0.1:{port}",
        region="us-east-1",
        access_key_id="test",
        secret_access_key="test",
        client_options={"allow_http": True},
    )
    store = zarr.storage.ObjectStore(bucket)
    array = zarr.create_array(store, name="x", shape=(4,), chunks=(2,), dtype="f4")
    array[:] = 1
    print(zarr.__version__, "before", array[:])
    assert array[:].tolist() == [1, 1, 1, 1]
    bucket.delete([x["path"] for part in bucket.list() for x in part])
    assert request("DELETE", "/bucket") == 204
    print("after", array[:])
    assert array[:].tolist() == [0, 0, 0, 0]
    try:
        array.with_config({"read_missing_chunks": False})[:]
    except Exception as e:
        print(type(e).__name__)
        assert type(e).__name__ == "ChunkNotFoundError"
    else:
        raise AssertionError("It reads all the same.")
finally:
    server.terminate()
PROGRAM
"$folder/env/bin/python" "$folder/program.py"
