"""What is on disk."""

import pathlib

from eqxbatch import (
    AbstractProgressMeter,
)


def chunks(path):
    """The contents of all chunks."""
    files = [x for x in pathlib.Path(path).rglob("c/**/*") if x.is_file()]
    return {str(x.relative_to(path)): x.read_bytes() for x in files}


# Runs that are continued.


class Stops(AbstractProgressMeter):
    """Raises after some blocks, and keeps a record."""

    after: int
    error: type
    log: list

    def start(self, num_blocks, num_done):
        self.log.append(("start", num_blocks, num_done))
        return 0

    def step(self, state, num_nans):
        self.log.append(("step", num_nans))
        if state + 1 == self.after:
            raise self.error("stopped")
        return state + 1

    def close(self, state):
        self.log.append(("close", state))
