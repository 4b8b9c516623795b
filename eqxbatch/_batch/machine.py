"""The memory of this machine, and of the control group that limits this process."""

import os
import pathlib
from collections.abc import Iterator


# Assumed of a machine that does not say how much memory it has.
_UNKNOWN = 2**32


def machine_bytes(root: pathlib.Path = pathlib.Path("/")) -> int:
    """The memory that this process can allocate, as far as the system says.

    Linux says what is available, and containers (control groups) limit it. Elsewhere,
    or if that cannot be read, it is the physical memory of the machine. `root` is where
    `proc` and `sys` are.
    """
    limits = [*_of_machine(root), *_of_groups(root)]
    return max(min(limits), 0) if limits else _physical_bytes()


def _physical_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no `sysconf`.
        return _UNKNOWN


def _of_machine(root: pathlib.Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            yield int(amount.split()[0]) * 1024


def _of_groups(root: pathlib.Path) -> Iterator[int]:
    """What each control group of this process leaves: limits minus use.

    A group is limited by those above it, too. Inside a container, the path of its group
    is often that on the host, and only the root is mounted.
    """
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        # Version 2 of control groups has one hierarchy, number 0, and version 1 has one
        # for each controller. Their files have other names.
        if number == "0":
            top, limit, use = "sys/fs/cgroup", "memory.max", "memory.current"
            cache = "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            use, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        path_of_group = pathlib.PurePosixPath(path.lstrip("/"))
        for group in (path_of_group, *path_of_group.parents):
            folder = root / top / group
            numbers = [*_lines(folder / limit), *_lines(folder / use)]
            if len(numbers) == 2 and all(map(str.isdecimal, numbers)):
                stats = dict(map(str.split, _lines(folder / "memory.stat")))
                # The kernel gives up cached files where memory is needed.
                yield int(numbers[0]) - int(numbers[1]) + int(stats.get(cache, 0))


def _lines(file: pathlib.Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
