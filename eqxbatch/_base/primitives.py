"""What primitives do.

Whatever goes through a program asks here what a primitive is: this is the only table of
their names. With some flags of JAX, and in its newer versions, primitives are objects
of JAX's own classes in one primitive; these have the names of the primitives that they
replace.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from .jaxpr_types import Eqn


# The primitives of which something is known, a line for each; `_OPAQUE` and `_APART`
# have the others:
#
# - what they do, in words that are explained below;
# - after a colon, all parameters that rules and views know: those that they use, and
#   those that do not change the linear function. An equation with any other, such as
#   one of a newer JAX, is declined. Without a colon, no rule or view is for it.
#
# `call`: runs a program, and has its derivative. `remat`: likewise, but computes the
# program again for the derivative. `expand`: likewise, but has to be asked for its
# program, or `jaxprs.py` has it. `custom`: has a derivative of its own. `identity`:
# each output is the input in the same place.
# `flat`: has a derivative of zero wherever it exists. `entries`: each entry of the
# outputs depends on the same entry of the inputs only. `linear`: in all inputs
# together; `linear-0-2`: in some of them together, where others are indices;
# `bilinear`: in each of the two. `straight`: has no second derivative, as these, but is
# not transposed. `sum`: adds or subtracts. `product`: costs more than it writes.
_TABLE = """
abs entries
acos entries
acosh entries
add entries linear sum :
add_any entries linear sum :
and entries
asin entries
asinh entries
atan entries
atan2 entries
atanh entries
bessel_i0e entries
bessel_i1e entries
broadcast_in_dim linear : shape broadcast_dimensions sharding
call call
cbrt entries
ceil entries flat
checkpoint remat
clamp entries
closed_call call
complex straight
concatenate linear : dimension
cond : branches
conv_general_dilated bilinear product : window_strides padding lhs_dilation \
    rhs_dilation dimension_numbers feature_group_count batch_group_count precision \
    preferred_element_type out_sharding
convert_element_type entries linear : new_dtype weak_type sharding
copy entries linear :
cos entries
cosh entries
cumsum linear
custom_jvp_call custom
custom_vjp_call custom
digamma entries
div entries :
dot_general bilinear product : dimension_numbers precision preferred_element_type \
    out_sharding
dynamic_slice linear-0 : slice_sizes
dynamic_update_slice linear-0-1 :
einsum expand
eq entries
erf entries
erf_inv entries
erfc entries
eval_jaxpr call
exp entries
exp2 entries
expm1 entries
fft straight
floor entries flat
gather linear-0 : dimension_numbers slice_sizes mode fill_value indices_are_sorted \
    unique_indices
ge entries
gt entries
igamma entries
igammac entries
imag straight
integer_pow entries
is_finite entries
jit call
le entries
lgamma entries
log entries
log1p entries
log2 entries
logistic entries
lt entries
max entries
min entries
mul entries bilinear : out_dtype
name identity
ne entries
neg entries linear :
nextafter entries flat
not entries
one_minus_square entries
optimization_barrier identity
or entries
pad linear
polygamma entries
polynomial expand
pow entries
program_order call
pvary entries straight
ragged_dot bilinear product : axes precision preferred_element_type
real straight
reduce_sum linear : axes out_sharding
regularized_incomplete_beta entries
rem entries
remat2 remat
reshape linear : new_sizes dimensions sharding
rev linear : dimensions
round entries flat
rsqrt entries
scan : jaxpr length reverse unroll num_consts num_carry linear _split_transpose ft_in \
    ft_out
scatter straight
scatter-add linear-0-2
select_n entries :
sign entries flat
sin entries
sinh entries
slice linear : start_indices limit_indices strides
split linear : sizes axis
sqrt entries
square entries
squeeze linear : dimensions
stack linear : axis
stop_gradient entries flat
sub entries linear sum :
tan entries
tanh entries
tile straight
transpose linear : permutation
unstack expand
xla_metadata_call call
xor entries
"""


def _parsed() -> Iterator[tuple[str, tuple[Sequence[str], frozenset[str] | None]]]:
    for line in _TABLE.strip().splitlines():
        (name, *words), *handled = (part.split() for part in line.split(":"))
        yield name, (words, frozenset(handled[0]) if handled else None)


_KNOWN = dict(_parsed())


# All others that JAX has, so that a test finds those that a release of it brings.
# `opaque` ones are functions like any other: their parameters fall back.
_OPAQUE = (
    # Linear, but parameters rarely pass through them.
    "conj custom_lin custom_transpose_call device_put full_to_shard layout_constraint "
    "linear_call reduce_precision reduce_window_sum reshard scatter-sub "
    "select_and_gather_add select_and_scatter_add shard_alike shard_to_full "
    "sharding_constraint symmetric_product "
    # Functions of several entries, without a second derivative, or of bits.
    "approx_top_k bitcast_convert_type cumlogsumexp cummax cummin cumprod "
    "igamma_grad_a "
    "random_gamma reciprocal reduce zeta reduce_max reduce_min reduce_prod "
    "reduce_window "
    "reduce_window_max reduce_window_min scatter-max scatter-min scatter-mul "
    "select_and_scatter sort top_k "
    # Products of two arrays.
    "bias_bwd bias_fwd cudnn_fusion dot_product_attention_bwd "
    "dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd "
    "dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd "
    "dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd "
    "dot_product_attention_fwd_wrapper ragged_dot_general rnn_bwd rnn_fwd scaled_dot "
    "scaled_matmul scaled_matmul_wrapper "
    # Linear algebra.
    "cholesky cholesky_update custom_linear_solve eig eigh eigh_jacobi geqp3 geqrf "
    "hessenberg householder_product lu ormqr qr schur svd triangular_solve tridiagonal "
    "tridiagonal_solve "
    # Arrays that are sparse.
    "bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense "
    "bcoo_sort_indices bcoo_spdot_general bcoo_sum_duplicates bcoo_todense "
    "bcoo_transpose bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense "
    "coo_fromdense coo_matmat coo_matvec coo_spmm coo_spmv coo_todense csr_fromdense "
    "csr_matmat csr_matvec csr_spmm csr_spmv csr_todense sparse_dense_matmul "
    "sparse_pack_nm spsolve todense "
    # Communication inside of `jax.shard_map`, which is opaque as a whole.
    "all_gather all_gather_done all_gather_invariant all_gather_reduced "
    "all_gather_reduced_start all_gather_start all_to_all all_to_all_done "
    "all_to_all_start global_array_to_host_local_array "
    "host_local_array_to_global_array "
    "pbroadcast pbroadcast_dynamic pgather pmax pmin ppermute ppermute_done "
    "ppermute_start precv preduced psend psum psum_done psum_invariant "
    "psum_invariant_start ragged_all_to_all reduce_scatter reduce_scatter_done "
    "reduce_scatter_start reduced_vary_cast reduced_vary_cast_p unreduced_pmax "
    "unreduced_pmin unreduced_psum unreduced_reduce_scatter vary_unreduced_cast "
    "vary_unreduced_cast_p "
    # What runs a program in a way of its own, which it would lose: in another place,
    # on several devices, as often as a condition says, or with a rule for batches.
    "call_exported call_hi_primitive call_hi_primitive_linearized composite compute_on "
    "core_map custom_dce_call custom_fusion custom_jvp_call_jaxpr custom_partitioning "
    "custom_vmap_call dce_sential dce_sink ffi_call fused_call fusible mosaic_gpu_p "
    "mpmd_map pallas_call pure_callback relayout remat_opt run_state scheduling_group "
    "shard_map stage tie tpu_custom_call unreachable while xla_metadata_value xla_pmap "
    "zeros_like "
)


# `apart`: no parameter can meet data in these.
_APART = (
    # Integers, booleans, keys, tokens, or no input.
    "after_all argmax argmin axis_index clz create_token dim_as_value dimension_size "
    "empty empty2 eq_to from_edtype iota iota_2x32_shape le_to lt_to "
    "lu_pivots_to_permutation mulhi philox2x32 philox4x32 platform_index "
    "population_count random_bits random_clone random_fold_in random_seed random_split "
    "random_unwrap random_wrap reduce_and reduce_or reduce_xor rng_bit_generator "
    "rng_uniform shape_assertion shift_left shift_right_arithmetic shift_right_logical "
    "threefry2x32 threefry4x32 to_edtype "
    # Side effects: the function is run as it is. References are replaced before.
    "accum_grad_in_ref addupdate box_get box_set buffer_callback check create_linear "
    "debug_callback debug_print empty_ref free_ref freeze get inspect_sharding "
    "io_callback new_box new_ref pin swap unpin "
    # Only inside of kernels of Pallas or Mosaic, and of programs of `thunky`.
    "_copysign add_dependency all_reduce_ffs all_reduce_population_count "
    "assume_for_verification async_copy_scales_to_tmem async_copy_smem_to_tmem "
    "async_copy_sparse_metadata_to_tmem async_load async_prefetch async_store_smem "
    "async_store_tmem atomic_cas atomic_rmw barrier barrier_arrive "
    "barrier_arrive_and_wait barrier_test barrier_wait bitcast broadcast_to "
    "commit_group commit_smem commit_tmem conv copy_gmem_to_smem copy_smem_to_gmem "
    "debug_barrier debug_barrier_p delay dma_start dma_wait einshape_lo "
    "elementwise_inline_asm elementwise_inline_asm_p emit_pipeline "
    "get_barrier_semaphore get_global griddepcontrol_launch_dependents "
    "griddepcontrol_wait has_memory_space inline_mgpu inline_mgpu_p jaxpr_call "
    "layout_cast load masked_cummax masked_cummin masked_cumsum masked_load "
    "masked_sort "
    "masked_swap matmul_acc_lhs matmul_lhs_fifo matmul_pop matmul_pop_fifo "
    "matmul_push_rhs max_contiguous mgpu_atomic_store mma mosaic_gpu_reduce_max "
    "mosaic_gpu_reduce_min mosaic_gpu_reduce_prod mosaic_gpu_reduce_sum "
    "multimem_load_reduce multimem_store multiple_of num_programs pack pack_dtype "
    "pack_elementwise parallel_loop pipeline_body pretend_for_verification "
    "print_layout "
    "prng_join prng_random_bits prng_seed prng_split program_id query_cluster_cancel "
    "remove_memory_space repeat roll run_scoped sc_fetch_and_add scan_count "
    "semaphore_read semaphore_signal semaphore_signal_multicast "
    "semaphore_signal_parallel semaphore_wait set_max_registers set_max_registers_p "
    "stochastic_round store tcgen05_commit_arrive tcgen05_mma thunky.all_gather "
    "thunky.all_reduce thunky.all_to_all thunky.async_done thunky.async_start "
    "thunky.call_jax thunky.call_thunky_nested thunky.collective_group "
    "thunky.collective_permute thunky.cond thunky.copy thunky.custom_call "
    "thunky.inline_constant thunky.memset thunky.memzero thunky.ptx_kernel "
    "thunky.reduce_scatter thunky.while trace_value try_cluster_cancel unique unpack "
    "unpack_dtype unpack_elementwise wait_gmem_to_smem wait_load_tmem "
    "wait_smem_to_gmem "
    "wgmma wgmma_accumulator_deref wgmma_accumulator_deref_p wgmma_accumulator_store "
    "wgmma_accumulator_store_p wgmma_ref wgmma_wait with_memory_space_constraint "
)


WITHOUT_RULES = {
    "opaque": frozenset(_OPAQUE.split()),
    "apart": frozenset(_APART.split()),
}


def with_trait(word: str) -> frozenset[str]:
    """The names of the primitives that have a word of the table."""
    return frozenset(name for name, (words, _) in _KNOWN.items() if word in words)


def unknown_parameters(eqn: Eqn) -> str:
    """The parameters of an equation that are unknown to rules and views.

    Parameters with unknown values are included. Empty if there are none, or if there is
    no rule for the equation at all.
    """
    _, handled = _KNOWN.get(eqn.primitive.name, ((), None))
    if handled is None:
        return ""
    unknown = sorted({*eqn.params} - handled)
    # The dtype of a product may differ from that of its factors.
    if eqn.params.get("out_dtype") is not None:
        unknown.append("out_dtype")
    return ", ".join(f"`{name}`" for name in unknown)


CUSTOM = with_trait("custom")


IDENTITIES = with_trait("identity")


LINEAR_IN_ALL = with_trait("linear")


LINEAR_IN_EACH = with_trait("bilinear")


LINEAR_IN_SOME = {
    name: tuple(map(int, word.split("-")[1:]))
    for name, (words, _) in _KNOWN.items()
    for word in words
    if word.startswith("linear-")
}


PRODUCTS = with_trait("product")


SUMS = with_trait("sum")


CALLS, EXPANDED, REMAT = map(with_trait, ("call", "expand", "remat"))


_FLAT = with_trait("flat")


# JAX's primitive for objects of classes.
OF_CLASSES = "call_hi_primitive"


# JAX's classes that stand for a primitive with other flags, or in older versions.
_CLASSES = {
    "CheckpointName": "name",
    "CustomJVPTraced": "custom_jvp_call",
    "CustomVJPTraced": "custom_vjp_call",
    "Einsum": "einsum",
    "RematTraced": "checkpoint",
}


# Others of its classes, which are functions like any other.
OPAQUE_CLASSES = frozenset(
    {
        "CheckpointNameFwd",
        "CustomRoot",
        "Einshape",
        "Frexp",
        "Fusible",
        "Ldexp",
        "Nonzero",
        "OptRemat",
        "PrimalLeftTangentRight",
        "Scan3",
        "SearchSorted",
        "_RootLinearMap",
    }
)


def name_of(eqn: Eqn) -> str:
    """The name of the primitive of an equation, with any flags of JAX.

    `jax_remat3` and similar flags replace primitives by objects of JAX's own classes.
    """
    if eqn.primitive.name != OF_CLASSES:
        return eqn.primitive.name
    kind = type(eqn.params["_prim"])
    unknown = f"{OF_CLASSES}[{kind.__name__}]"
    is_of_jax = kind.__module__.startswith("jax.")
    return _CLASSES.get(kind.__name__, unknown) if is_of_jax else unknown


def is_unknown_object(eqn: Eqn) -> bool:
    """Whether an equation is an object of a class that no table knows.

    It may have a derivative in one mode only, and no transpose.
    """
    return name_of(eqn).startswith(OF_CLASSES)


def parameters(eqn: Eqn) -> dict[str, Any]:
    """The parameters of an equation, with any flags of JAX."""
    is_object = eqn.primitive.name == OF_CLASSES
    return eqn.params["_prim"].params if is_object else eqn.params


def is_remat(eqn: Eqn) -> bool:
    """Whether an equation computes its program again for the derivative."""
    return name_of(eqn) in REMAT


def is_flat(eqn: Eqn) -> bool:
    """Whether the derivative of an equation is zero or does not exist."""
    if name_of(eqn) in _FLAT:
        return True
    return not any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
