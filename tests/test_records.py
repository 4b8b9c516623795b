"""The suite of records, with small jobs on a CPU."""

import json
import math

import jax
import pytest

from benchmarks import harness, limit, record_rows, records


# Their models are those of suites that import peers, which tests do not install. The
# quick benchmarks run them.
NEED_PEERS = ("lora", "price")


def test_small_records(monkeypatch):
    """Each row in a run of its own, which keeps those before."""
    monkeypatch.setattr(harness, "_judges_times", False)
    names = [name for names in record_rows.ROWS for name in names]
    figures, titles, text = {}, [], ""
    for name in names:
        if name in NEED_PEERS:
            continue
        before = figures
        for found in records.run(True, name, before):
            figures, text, bars = found
            limit.check(text, None)
            assert [bar.name for bar in bars if not bar.holds] == []
        # As they are written to a file and read again.
        figures = json.loads(json.dumps(figures))
        new = [title for title in figures["jobs"] if title not in titles]
        assert new
        assert all(title.startswith(f"{name}: ") for title in new)
        assert all(figures["jobs"][title] == before["jobs"][title] for title in titles)
        titles += new
    for title in titles:
        job, share = figures["jobs"][title], figures["limit"]["jobs"][title]
        assert all(x > 0 for x in job["seconds"].values())
        assert job["ratios"][harness.OURS] == 1
        assert share["work"]["flops"] > 0
        assert share["work"]["bytes"] > 0
        assert job["missing"] or len(job["ratios"]) > 1 or title.startswith("solve")
        # The first line of a job has the FLOPs, and the share.
        (line,) = [
            line for line in text.splitlines() if line.startswith(f"| {title} |")
        ]
        assert len(line.split("|")) == 9


def test_a_cpu_runs_small_records_only():
    assert jax.default_backend() == "cpu"
    assert records.find("gpu", quick=False) is None
    assert records.find(None, quick=False) is None
    assert records.find("h100", quick=True) is None
    assert records.find("gpu", quick=True) == records.find(None, quick=True) == "cpu"
    command = "python -m benchmarks --suite records"
    assert f"{command} --device gpu" in records.how_to_use()
    assert f"{command} --quick" in records.how_to_use()


@pytest.mark.parametrize(
    ("on_device", "share", "place"),
    ((4.0, 1, "device"), (2.0, 1, "host"), (2.0, 100, "disk"), (None, 0.1, "device")),
)
def test_a_kernel_is_kept_where_there_is_room(monkeypatch, on_device, share, place):
    """The memory of the device in kernels; the size of a kernel in memories of this."""

    class Device:
        def memory_stats(self):
            return None if on_device is None else {"bytes_limit": on_device * size}

    in_host = 1e9
    size = in_host * share / 3
    pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": in_host}
    monkeypatch.setattr(record_rows.os, "sysconf", pages.get)
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert record_rows.place_for(size) == place


def test_rounds_end_when_they_took_long(monkeypatch):
    monkeypatch.setattr(records, "SECONDS", -math.inf)
    times, results = records.run_in_turn({"a": lambda: 1, "b": lambda: 2})
    assert {way: len(own) for way, own in times.items()} == {"a": 1, "b": 1}
    assert results == {"a": 1, "b": 2}
