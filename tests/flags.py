"""How XLA compiles what the tests run."""

import jax


# Programs run once, or twice: to compile them takes longer than that, and most of it is
# spent to make them faster.
COMPILE_FAST = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
FOUR_DEVICES = "--xla_force_host_platform_device_count=4"


def compiler_options(examples) -> dict[str, bool]:
    """What `jax.jit` needs besides `COMPILE_FAST` to be right for some examples.

    Without fusion emitters, XLA compares indices of 8 bits with the size of a table in
    8 bits, where 300 is 44, and drops rows of JAX's own derivatives.
    """
    has_bytes = any(x.dtype in ("uint8", "int8") for x in jax.tree.leaves(examples))
    return {"xla_cpu_use_fusion_emitters": True} if has_bytes else {}
