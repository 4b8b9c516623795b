"""Programs for an accelerator, compiled where there is none, and what they do.

The plug-in of a GPU or TPU compiles without the device. XLA's optimised program then
says how many kernels run, how many bytes these move, and how many operations they do in
which precision, and a roofline estimates their time. Nothing is run.
"""

import collections
import dataclasses
import functools
import importlib
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from eqxbatch._base.platforms import for_platform, GPU, Platform, TPU


# The data sheet of an H100 SXM, as XLA reads it.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84978434048
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Accelerator:
    """A device, and the public numbers of a roofline.

    - `platform`, `topology`, `settings`: what `topologies.get_topology_desc` needs for
        a number of devices.
    - `choices`: what eqxbatch assumes to be cheaper there.
    - `plugin`: the module of the plug-in; `packages` are those to install.
    - `bandwidth`: bytes per second to and from its memory.
    - `peaks`: the operations per second of products, by precision.
    - `rest`: the operations per second of everything else.
    - `launch`: the seconds that each kernel takes at least.
    - `clock`: the cycles per second, where XLA estimates cycles of each kernel.
    """

    name: str
    platform: str
    topology: Callable[[int], str]
    settings: Callable[[int], dict[str, str]]
    choices: Platform
    plugin: str
    packages: tuple[str, ...]
    bandwidth: float
    peaks: dict[str, float]
    rest: float
    launch: float
    clock: float | None = None

    @property
    def is_installed(self) -> bool:
        try:
            return importlib.util.find_spec(self.plugin) is not None
        except ModuleNotFoundError:
            return False

    def devices(self, num: int = 1) -> list[Any]:
        """Some devices, for shardings and meshes of programs that are compiled only."""
        return list(_topology(self, num).devices[:num])

    def compile(self, fun: Callable, *args: Any) -> Any:
        """`fun` compiled for arrays or shapes, which are on one device."""
        one = SingleDeviceSharding(self.devices()[0])
        on_it = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one)
        return self.compile_placed(fun, *jax.tree.map(on_it, args))

    def compile_placed(self, fun: Callable, *args: Any) -> Any:
        """`fun` compiled for shapes that say on which devices they are."""
        with for_platform(self.choices):
            traced = jax.jit(fun).trace(*args)
            lowered = traced.lower(lowering_platforms=(self.platform,))
            try:
                return lowered.compile()
            except jax.errors.JaxRuntimeError as e:
                # XLA for GPUs cannot tile some products for Triton. It compiles them
                # otherwise, if it does not try.
                if "output tile sizes" not in str(e):
                    raise
                return lowered.compile({"xla_gpu_enable_triton_gemm": False})


@functools.cache
def _topology(accelerator: Accelerator, num: int) -> Any:
    # These stop libtpu from asking the machine for its devices.
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        raise ValueError("Set JAX_PLATFORMS=cpu, or plug-ins look for their devices.")
    return topologies.get_topology_desc(
        accelerator.topology(num), accelerator.platform, **accelerator.settings(num)
    )


# What `--device` calls the one that JAX finds.
HERE = "gpu"
ACCELERATORS = {
    "h100": Accelerator(
        "an H100 SXM",
        "cuda",
        lambda num: "h100",
        lambda num: {"target_config": H100, "topology": f"1x1x{num}"},
        GPU,
        "jax_plugins.xla_cuda12",
        ("jax", "jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"),
        bandwidth=3.35e12,
        peaks={"bf16": 989e12, "tf32": 494e12, "f32": 67e12, "f64": 67e12},
        rest=33.5e12,
        launch=2e-6,
    ),
    "v5e": Accelerator(
        "a TPU v5e",
        "tpu",
        lambda num: "v5e:2x2" if num <= 4 else "v5e:2x4",
        lambda num: {},
        TPU,
        "libtpu",
        ("jax[tpu]",),
        bandwidth=819e9,
        # Products in float32 are six in bfloat16.
        peaks={"bf16": 197e12, "f32": 33e12},
        rest=4e12,
        launch=0.0,
        clock=1.5e9,
    ),
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a program does, or a part of it.

    - `transposed`: the bytes of arrays that kernels copy or transpose.
    - `flops`: those of products, by precision.
    - `per_trip`: the kernels of one trip of the loop that runs the most of them.
    - `is_known`: whether the trips of all loops are.
    """

    kernels: float = 0.0
    bytes: float = 0.0
    transposed: float = 0.0
    seconds: float = 0.0
    flops: dict[str, float] = dataclasses.field(default_factory=dict)
    per_trip: float = 0.0
    is_known: bool = True

    def __add__(self, other: "Cost") -> "Cost":
        names = {**self.flops, **other.flops}
        get = lambda cost, name: cost.flops.get(name, 0.0)
        flops = {name: get(self, name) + get(other, name) for name in names}
        return Cost(
            self.kernels + other.kernels,
            self.bytes + other.bytes,
            self.transposed + other.transposed,
            self.seconds + other.seconds,
            flops,
            max(self.per_trip, other.per_trip),
            self.is_known and other.is_known,
        )

    def __mul__(self, trips: int) -> "Cost":
        return Cost(
            trips * self.kernels,
            trips * self.bytes,
            trips * self.transposed,
            trips * self.seconds,
            {name: trips * num for name, num in self.flops.items()},
            self.kernels,
            self.is_known,
        )

    @property
    def lower_precision(self) -> float:
        """The share of products that keep fewer digits than float32."""
        most = self.flops.get("f32", 0.0) + self.flops.get("f64", 0.0)
        return 1 - most / sum(self.flops.values()) if self.flops else 0.0


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a program: its result's shape, operation, operands and the rest."""

    name: str
    shape: str
    op: str
    operands: list[str]
    rest: str

    def called(self, *keys: str) -> list[str]:
        """The computations that it names."""
        found = re.search(rf"\b(?:{'|'.join(keys)})=(\{{[^}}]*\}}|%[\w.-]+)", self.rest)
        return re.findall(r"%([\w.-]+)", found[1]) if found else []

    def setting(self, pattern: str) -> str:
        found = re.search(pattern, self.rest)
        return found[1] if found else ""

    @property
    def precision(self) -> str:
        """That of a product: what it says, or JAX's default."""
        found = self.setting(r"operand_precision=\{(\w+)")
        found = found or self.setting(r'operand_precision":\["(\w+)"')
        return (self.setting(r"\balgorithm=(\w+)") or found or "default").lower()


SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(")
# Instructions that are no kernels.
FREE = re.compile(
    r"parameter|constant|get-tuple-element|tuple|bitcast|after-all|.*-id|opt-barrier|"
    r".*-(done|update)|add-dependency"
)
NO_KERNELS = ("AllocateBuffer", "ConcatBitcast", "Sharding", "AssumeGatherIndices")
# Within a kernel, these do no arithmetic.
MOVES = re.compile(
    r"parameter|constant|broadcast|bitcast.*|reshape|tuple|get-tuple-element|iota|"
    r"(dynamic-)?slice|dynamic-update-slice|transpose|copy|pad|concatenate|gather|"
    r"dot|convolution|fusion|custom-call"
)


def dimensions(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def num_elements(shape: str) -> int:
    """The elements of the first array of a shape."""
    found = SHAPE.search(shape)
    return math.prod(dimensions(found[2])) if found else 0


def num_bytes(shape: str) -> int:
    """The bytes of the arrays of a shape that are in the device's main memory."""
    total = 0
    for dtype, sizes, layout in SHAPE.findall(shape):
        bits = int("".join(re.findall(r"^\D+(\d+)", dtype)) or 8)
        is_on_chip = "S(1)" in layout
        total += 0 if is_on_chip else math.prod(dimensions(sizes)) * bits // 8
    return total


def split(line: str, start: int) -> tuple[str, str]:
    """The text up to the bracket that closes the one before `start`, and the rest."""
    depth = 1
    for end in range(start, len(line)):
        depth += (line[end] == "(") - (line[end] == ")")
        if not depth:
            return line[start:end], line[end + 1 :]
    return line[start:], ""


class Program:
    """XLA's optimised program: computations of instructions, by name."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        lines: dict[str, Instruction] = {}
        for line in text.splitlines():
            if found := COMPUTATION.match(line):
                lines = self.computations[found[2]] = {}
                if found[1]:
                    self.entry = found[2]
            elif found := INSTRUCTION.match(line):
                inside, rest = split(line, found.end())
                operands = re.findall(r"%([\w.-]+)", inside) or [inside]
                lines[found[1]] = Instruction(
                    found[1], found[2], found[3], operands, rest
                )

    def instructions(self) -> Iterator[Instruction]:
        for lines in self.computations.values():
            yield from lines.values()

    def trips(self, loop: Instruction) -> int | None:
        """How often a loop runs: what XLA knows, or the constant that it counts to."""
        known = loop.setting(r'known_trip_count":\{"n":"(\d+)"')
        if known:
            return int(known)
        limits, todo = [], loop.called("condition")
        while todo:
            for x in self.computations[todo.pop()].values():
                todo += x.called("calls")
                if x.op == "constant" and re.match(r"[su]\d+\[\]", x.shape):
                    limits += [int(x.operands[0])]
        return max(limits, default=0) or None

    def cost(self, device: Accelerator, computation: str | None = None) -> Cost:
        lines = self.computations[computation or self.entry]
        return sum((self._cost(x, lines, device) for x in lines.values()), Cost())

    def _cost(
        self, x: Instruction, lines: dict[str, Instruction], device: Accelerator
    ) -> Cost:
        if FREE.fullmatch(x.op):
            return Cost()
        if x.op == "while":
            trips = self.trips(x)
            cost = self.cost(device, *x.called("body")) * (trips or 1)
            return dataclasses.replace(cost, is_known=cost.is_known and bool(trips))
        if x.op == "conditional":
            branches = x.called("branch_computations")
            branches += x.called("true_computation") + x.called("false_computation")
            # Others are for numbers that are out of range, or that nearly cancel.
            costs = (self.cost(device, name) for name in branches)
            return min(costs, key=lambda cost: cost.seconds)
        inner = x.called("calls", "to_apply")
        if x.op == "call" or (x.op == "async-start" and inner):
            return self.cost(device, *inner)
        target = x.setting(r'custom_call_target="([^"]*)"')
        if target.startswith(NO_KERNELS):
            return Cost()
        return self._kernel(x, lines, target, device)

    def _kernel(
        self,
        x: Instruction,
        lines: dict[str, Instruction],
        target: str,
        device: Accelerator,
    ) -> Cost:
        inside = list(self._inside(x, lines))
        flops: dict[str, float] = collections.defaultdict(float)
        others = transposed = 0
        # Those of a custom fusion are products, which read their factors in any order.
        is_product = "kind=kCustom" in x.rest
        for y, near in inside:
            num = self._flops(y, near, target)
            if num:
                dtype = self._shape(y.operands[0], near)[0]
                flops[_precision(dtype, y.precision, device)] += num
            if y.op in ("transpose", "copy") and not is_product:
                transposed += num_bytes(y.shape)
            if not MOVES.fullmatch(y.op):
                is_sum = y.op.startswith("reduce") and y.operands[0] in near
                others += num_elements((near[y.operands[0]] if is_sum else y).shape)
        moved = self._bytes(x, lines)
        work = sum(num / device.peaks[name] for name, num in flops.items())
        work += others / device.rest
        seconds = max(moved / device.bandwidth, work, device.launch)
        cycles = x.setting(r'estimated_cycles":"(\d+)"')
        if device.clock and cycles:
            seconds = int(cycles) / device.clock
        return Cost(1, moved, transposed, seconds, dict(flops))

    def _inside(
        self, x: Instruction, lines: dict[str, Instruction]
    ) -> Iterator[tuple[Instruction, dict[str, Instruction]]]:
        """An instruction and those that are fused in it, with what is around them."""
        yield x, lines
        for name in x.called("calls") if x.op == "fusion" else ():
            inner = self.computations[name]
            for y in inner.values():
                yield from self._inside(y, inner)

    def _shape(self, name: str, lines: dict[str, Instruction]) -> tuple[str, list[int]]:
        found = SHAPE.search(lines[name].shape) if name in lines else None
        return (found[1], dimensions(found[2])) if found else ("f32", [])

    def _flops(
        self, x: Instruction, lines: dict[str, Instruction], target: str
    ) -> float:
        """Those of a product; 0 for everything else."""
        is_call = x.op == "custom-call"
        if not (x.op in ("dot", "convolution") or (is_call and "$" in target)):
            return 0.0
        (_, lhs), (_, rhs) = (self._shape(name, lines) for name in x.operands[:2])
        out = dimensions((SHAPE.search(x.shape) or ["", "", ""])[2])
        axes = x.setting(r"lhs_contracting_dim\w*\"?[=:][\[{]([\d,\"]*)[\]}]")
        if x.op == "dot" or axes:
            summed = [lhs[int(axis)] for axis in re.findall(r"\d+", axes)]
            return 2.0 * math.prod(out) * math.prod(summed)
        labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.rest)
        if labels is None:
            return 0.0
        positions, kernel = out, rhs
        labels_of, labels_of_kernel = labels[3], labels[2]
        if "BackwardFilter" in target:
            positions, kernel = rhs, out
        elif "BackwardInput" in target:
            positions = lhs
        # Of each output, all numbers of the kernel but those of other outputs.
        places = [
            size
            for label, size in zip(labels_of, positions, strict=True)
            if label != "f"
        ]
        outputs = kernel[labels_of_kernel.index("o")]
        if not is_call:
            return 2.0 * math.prod(out) * math.prod(kernel) / max(outputs, 1)
        return 2.0 * math.prod(places) * math.prod(kernel)

    def _bytes(self, x: Instruction, lines: dict[str, Instruction]) -> float:
        """What a kernel reads and writes; of slices, only what these contain."""
        shapes = [lines[name].shape for name in x.operands if name in lines]
        if x.op in ("dynamic-slice", "slice", "gather"):
            return 2 * num_bytes(x.shape)
        if x.op == "dynamic-update-slice":
            return 2 * num_bytes(shapes[1])
        if x.op == "copy-start":
            # Its result has both the copy and the original.
            return num_bytes(x.shape)
        total = sum(map(num_bytes, shapes)) + num_bytes(x.shape)
        if x.op != "fusion":
            return total
        (name,) = x.called("calls")
        inner = self.computations[name]
        for y in inner.values():
            if y.op == "parameter":
                total -= max(num_bytes(y.shape) - self._read(y, inner), 0)
            if y.op == "dynamic-update-slice":
                target = inner[y.operands[0]]
                while target.op == "bitcast":
                    target = inner[target.operands[0]]
                if target.op == "parameter":
                    # The rest stays where it is.
                    written = num_bytes(inner[y.operands[1]].shape)
                    total -= num_bytes(y.shape) - written
        return max(total, 0)

    def _read(self, x: Instruction, lines: dict[str, Instruction]) -> float:
        """How much of `x` is read within a kernel."""
        whole, part = num_bytes(x.shape), 0.0
        for y in lines.values():
            if x.name not in y.operands:
                continue
            is_first = y.operands[0] == x.name
            if y.op == "bitcast":
                part += self._read(y, lines)
            elif y.op in ("dynamic-slice", "slice", "gather") and is_first:
                part += num_bytes(y.shape)
            elif not (y.op == "dynamic-update-slice" and is_first):
                return whole
        return min(whole, part)


def _precision(dtype: str, precision: str, device: Accelerator) -> str:
    """The name of the peak rate for products of a dtype."""
    if named := re.match(r"dot_(bf16|tf32|f32|f64|f16)_", precision):
        dtype, precision = named[1].replace("f16", "bf16"), "highest"
    if dtype != "f32" or precision == "highest":
        dtype = {"f16": "bf16", "c64": "f32", "c128": "f64"}.get(dtype, dtype)
        return dtype if dtype in device.peaks else "f32"
    # JAX's default for products in float32.
    return "tf32" if "tf32" in device.peaks else "bf16"


def cost(compiled: Any, accelerator: Accelerator) -> Cost:
    """What a compiled program does."""
    return Program(compiled.as_text()).cost(accelerator)
