"""Options with which compilers report the memory that a program may take."""

from typing import Any

from .versions import is_compiler_option


# XLA for CPUs assigns memory before LLVM optimises the code. Optimisation takes up to
# half of the time and does not change the memory.
_UNOPTIMISED = {"cpu": {"xla_backend_optimization_level": 0}}


# XLA for CPUs gives a product and what follows it to YNNPACK, as
# one fusion, whose memory it reports as 0: softmax of attention in 36 MB blocks is seen
# to take 72 MB, and 73 MB are reported without such fusions. The value is a list of
# kinds; this one is empty.
_WITHOUT_LIBRARY = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": ""}}


def memory_options(
    backend: str, *, optimised: bool = False, with_library: bool = False
) -> dict[str, Any]:
    """Compiler options with which XLA reports the memory that a program may take.

    They are for programs that are compiled only to be measured.
    """
    options: dict[str, Any] = {} if optimised else {**_UNOPTIMISED.get(backend, {})}
    if not with_library and has_library(backend):
        options |= _WITHOUT_LIBRARY[backend]
    return options


def has_library(backend: str) -> bool:
    """Whether the compiler gives products to a library, and can do without."""
    options = _WITHOUT_LIBRARY.get(backend, {})
    return any(is_compiler_option(*x) for x in options.items())
