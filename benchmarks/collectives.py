"""The bytes that the devices of a mesh exchange, read from a compiled program.

Each device of a ring of `n` sends `n - 1` pieces of what it gathers or scatters. A sum
that all devices keep is scattered first and gathered then.
"""

import collections
import math
import re
from collections.abc import Callable
from typing import Any

from .programs import Instruction, num_bytes, Program


# What each device sends of an operand of `size` bytes, in groups of `n` devices.
SENT: dict[str, Callable[[float, int], float]] = {
    "all-gather": lambda size, n: size * (n - 1),
    "all-reduce": lambda size, n: 2 * size * (n - 1) / n,
    "reduce-scatter": lambda size, n: size * (n - 1) / n,
    "all-to-all": lambda size, n: size * (n - 1) / n,
    "ragged-all-to-all": lambda size, n: size * (n - 1) / n,
    "collective-broadcast": lambda size, n: size,
    "collective-permute": lambda size, n: size,
}


class Collectives:
    """The exchanges of a compiled program, of each trip of each loop.

    Of a conditional, the branch counts that exchanges less: others are for numbers that
    are out of range, or that nearly cancel.
    """

    def __init__(self, text: str):
        self.program = Program(text)
        found = re.search(r"num_partitions=(\d+)", text)
        self.devices = int(found[1]) if found else 1

    def sent(self, computation: str | None = None) -> dict[str, float]:
        """The bytes that each device sends, by the kind of exchange."""
        total: collections.Counter[str] = collections.Counter()
        lines = self.program.computations[computation or self.program.entry]
        for x in lines.values():
            total.update(self._sent_by(x, lines))
        return dict(total)

    def gathered(self) -> list[int]:
        """The bytes of each result of an `all-gather`, wherever it is."""
        return [
            size * self._group(x)
            for lines in self.program.computations.values()
            for x in lines.values()
            if x.op.removesuffix("-start") == "all-gather"
            for size in self._sizes(x, lines)
        ]

    def _sent_by(
        self, x: Instruction, lines: dict[str, Instruction]
    ) -> dict[str, float]:
        kind = x.op.removesuffix("-start")
        if kind in SENT:
            size = sum(self._sizes(x, lines))
            return {kind: SENT[kind](size, self._group(x))}
        if x.op == "while":
            trips = self.program.trips(x)
            if trips is None:
                raise ValueError(f"XLA does not know how often {x.name} runs.")
            sent = self.sent(*x.called("body"))
            return {kind: trips * size for kind, size in sent.items()}
        if x.op == "conditional":
            branches = x.called("branch_computations")
            branches += x.called("true_computation") + x.called("false_computation")
            sums = map(self.sent, branches)
            return min(sums, key=lambda sent: sum(sent.values()))
        if x.op in ("call", "fusion", "async-start"):
            return self.sent(*x.called("calls", "to_apply"))
        return {}

    def _sizes(self, x: Instruction, lines: dict[str, Instruction]) -> list[int]:
        """The bytes of each operand of an exchange."""
        # What a TPU has on the chip is sent, too.
        shape = lambda name: lines[name].shape.replace("S(1)", "")
        return [num_bytes(shape(name)) for name in x.operands if name in lines]

    def _group(self, x: Instruction) -> int:
        """How many devices exchange something with each other."""
        if first := x.setting(r"replica_groups=\{\{([\d,]*)\}"):
            return len(first.split(","))
        # Groups in rows: `[groups,devices]<=[...]`.
        if sizes := x.setting(r"replica_groups=\[\d+,(\d+)\]"):
            return int(sizes)
        # Along axes of a mesh: `mesh['data'=4,'model'=2] {'data'}`.
        if named := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", x.rest):
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
            # Of a part of an axis, the size is there: `'data':(1)2`.
            axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
            return math.prod(int(part or sizes[name]) for name, part in axes)
        return self.devices


def sent(compiled: Any) -> float:
    """The bytes that each device sends while a compiled program runs."""
    return math.fsum(Collectives(compiled.as_text()).sent().values())
