"""How XLA compiles what the tests run."""

# Programs run once, or twice: to compile them takes longer than that, and most of it is
# spent to make them faster.
COMPILE_FAST = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
FOUR_DEVICES = "--xla_force_host_platform_device_count=4"
