"""How XLA compiles what the tests run, and what JAX will do by default."""

import os

import jax


# XLA aborts the process at a flag that it does not know, and newer ones always use the
# emitters.
CAN_TURN_OFF_EMITTERS = jax.__version_info__ < (0, 11, 1)
# Tests run most programs once or twice. Compiling these takes longer than running them.
# These leave it to LLVM to do little, and the programs of XLA as they are.
LLVM_FAST = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
COMPILE_FAST = LLVM_FAST
if CAN_TURN_OFF_EMITTERS:
    COMPILE_FAST += " --xla_cpu_use_fusion_emitters=false"
FOUR_DEVICES = "--xla_force_host_platform_device_count=4"

# Settings of JAX that are to become its defaults, of which a version has some.
COMING = (
    "jax_custom_jvp3",
    "jax_custom_vjp3",
    "jax_remat3",
    "jax_use_simplified_jaxpr_constants",
)


def turn_on_coming_defaults() -> None:
    """Turns these on, if the variable `EQXBATCH_JAX_FLAGS` is `coming`."""
    wanted = os.environ.get("EQXBATCH_JAX_FLAGS", "")
    if wanted not in ("", "coming"):
        raise ValueError(f"EQXBATCH_JAX_FLAGS must be 'coming'; got {wanted!r}")
    there = [name for name in COMING if wanted and hasattr(jax.config, name)]
    if wanted and not there:
        raise ValueError(f"JAX {jax.__version__} has none of {COMING}")
    for name in there:
        jax.config.update(name, True)


def compiler_options(examples) -> dict[str, bool]:
    """What `jax.jit` needs besides `COMPILE_FAST` to be right for some examples.

    Without fusion emitters, XLA compares indices of 8 bits with the size of a table in
    8 bits, where 300 is 44, and drops rows of JAX's own derivatives.
    """
    if not CAN_TURN_OFF_EMITTERS:
        return {}
    has_bytes = any(x.dtype in ("uint8", "int8") for x in jax.tree.leaves(examples))
    return {"xla_cpu_use_fusion_emitters": True} if has_bytes else {}
