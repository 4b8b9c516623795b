"""How XLA compiles what the tests run."""

import jax


# XLA aborts the process at a flag that it does not know, and newer ones always use the
# emitters.
CAN_TURN_OFF_EMITTERS = jax.__version_info__ < (0, 11, 1)
# Tests run most programs once or twice. Compiling these takes longer than running them.
COMPILE_FAST = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
if CAN_TURN_OFF_EMITTERS:
    COMPILE_FAST += " --xla_cpu_use_fusion_emitters=false"
FOUR_DEVICES = "--xla_force_host_platform_device_count=4"


def compiler_options(examples) -> dict[str, bool]:
    """What `jax.jit` needs besides `COMPILE_FAST` to be right for some examples.

    Without fusion emitters, XLA compares indices of 8 bits with the size of a table in
    8 bits, where 300 is 44, and drops rows of JAX's own derivatives.
    """
    if not CAN_TURN_OFF_EMITTERS:
        return {}
    has_bytes = any(x.dtype in ("uint8", "int8") for x in jax.tree.leaves(examples))
    return {"xla_cpu_use_fusion_emitters": True} if has_bytes else {}
