"""Breaks the package on purpose, and sees whether the tests notice.

`python -m tests.breakages` applies each breakage to a copy of the checkout, one at a
time, and runs the tests there that ought to notice it. It is run by hand: pytest does
not collect it, and CI does not run it.

- `python -m tests.breakages --list`: the names and numbers of all.
- `python -m tests.breakages 3 17 "a reversed scan runs forwards"`: some of them.
- `python -m tests.breakages 3 --tests tests`: with the whole suite. What pytest is to
  select goes in quotes: `--tests "tests/batch/test_memory.py -k cache"`.

A breakage that survives is one of two things: something that no user can see, which is
replaced by another, or a test that is missing.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time


ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Breakage:
    """In the file, `old` becomes `new`; the tests are what pytest is given."""

    name: str
    file: str
    old: str
    new: str
    tests: str


BREAKAGES = [
    # Backward passes that are not linear, and padding.
    Breakage(
        "a backward pass that is not linear counts as linear",
        "_base/backward.py",
        "    return CustomBackward(not found, all(found))",
        "    return CustomBackward(True, True)",
        "tests/gradients/test_backward_passes.py",
    ),
    Breakage(
        "a result that does not depend on the cotangent counts as linear",
        "_base/backward.py",
        "        if OTHER in outs:",
        "        if False:",
        "tests/gradients/test_backward_passes.py -k which_are_linear",
    ),
    Breakage(
        "what a call returns is batched if any of its inputs is",
        "_base/backward.py",
        "        if len(outs) == len(eqn.outvars):\n            return outs",
        "        if False:\n            return outs",
        "tests/gradients/test_backward_passes.py -k belong",
    ),
    Breakage(
        "gradients are formed where one backward pass is right",
        "_gradients/micro_grad.py",
        "            blocks = dataclasses.replace(blocks, overlaps=False)",
        "            pass",
        "tests/gradients/test_backward_passes.py -k one_backward_pass",
    ),
    Breakage(
        "Hessians are weighted before their backward pass",
        "_batch/derivative.py",
        "            sums = weighted_after(sums, loss.batch.axes)",
        "            pass",
        "tests/gradients/test_backward_passes.py -k hessians",
    ),
    Breakage(
        "the host is called again for rows of two microbatches",
        "_batch/loop.py",
        "    if any(map(calls_host, equations_in(closed))):",
        "    if False:",
        "tests/maps/test_tracing.py -k host",
    ),
    Breakage(
        "padding is replaced also where weights are differentiated",
        "_batch/padding.py",
        "        return x, t_x",
        "        pass",
        "tests/batch/test_weights.py -k of_zero",
    ),
    Breakage(
        "padding is not replaced",
        "_batch/padding.py",
        "    return jnp.where(_along(weights.astype(bool), x, axis), x, row)",
        "    return x",
        "tests/batch/test_weights.py -k padding",
    ),
    # Annotations.
    Breakage(
        "the annotations of the settings of a transform are not checked",
        "_batch/transform.py",
        "check_types({field.name: value}, {field.name: field.type}, always=True)",
        "check_types({}, {}, always=True)",
        "tests/wrong_calls -k filter_micro_vmap",
    ),
    Breakage(
        "a bool counts as a number",
        "_base/checks.py",
        "options = tuple(x for x in options if x not in (int, float))",
        "options = tuple(x for x in options if x not in ())",
        "tests/base/test_checks.py",
    ),
    Breakage(
        "a remainder of one row is broadcast",
        "_batch/loop.py",
        "if shape != rest_shape:",
        "if len(shape) != len(rest_shape):",
        "tests/wrong_calls -k microbatch",
    ),
    Breakage(
        "vectors of a product may have any number of rows",
        "_kernels/reductions.py",
        "check_equal(what, vectors.shape[0], kernel.shape[1], remedy)",
        "check_equal(what, vectors.shape[0], vectors.shape[0], remedy)",
        "tests/wrong_calls -k KernelProduct",
    ),
    # Blocks, accumulators and memory.
    Breakage(
        "each batch of a stream has the random numbers of the first one",
        "_batch/loop.py",
        "return self.before[self.active].num_examples",
        "return 0",
        "tests/batch/test_stream.py -k monte",
    ),
    Breakage(
        "a stream of many batches loses what rounding takes",
        "_batch/accumulators.py",
        "return _MANY + 1 if blocks.continues else blocks.num",
        "return blocks.num",
        "tests/batch/test_stream.py -k float32",
    ),
    Breakage(
        "stored rows are kept although their examples have changed",
        "_batch/store.py",
        'seal = hashlib.blake2b(f"{chunk.index}{source}".encode(), digest_size=16)',
        'seal = hashlib.blake2b(f"{chunk.index}".encode(), digest_size=16)',
        "tests/batch/test_stream.py -k disk",
    ),
    Breakage(
        "weights that come with the batches are ignored",
        "_batch/stream.py",
        "return dataclasses.replace(accumulator, weights=weights)",
        "return accumulator",
        "tests/batch/test_stream.py -k 'weights and mask'",
    ),
    Breakage(
        "an error of a reader is the end of the batches",
        "_batch/stream.py",
        "return iter(batches) if num is None else (batches[i] for i in range(num))",
        "return iter(batches)",
        "tests/batch/test_loaders.py -k end",
    ),
    Breakage(
        "a slice may have fewer rows than were asked for",
        "_batch/batch.py",
        "if part.shape[:1] != (stop - start,):",
        "if part.shape[1:] != tuple(x.shape[1:]):",
        "tests/batch/test_loaders.py -k come",
    ),
    Breakage(
        "of no examples, the variance is NaN for all batches that follow",
        "_batch/accumulators.py",
        "of_both = xp.where(of_both == 0, xp.ones_like(of_both), of_both)",
        "of_both = xp.where(of_both < 0, xp.ones_like(of_both), of_both)",
        "tests/batch/test_stream.py -k 'equals and map'",
    ),
    Breakage(
        "equal extremes of one block count once",
        "_batch/accumulators.py",
        "count = jnp.sum(values == extreme[None], axis=0, dtype=jnp.int32)",
        "count = jnp.ones(extreme.shape, jnp.int32)",
        "tests/batch -k extremes",
    ),
    Breakage(
        "weights are added in the dtype of the result",
        "_batch/accumulators.py",
        "jnp.sum(block.new(block.take(weights).astype(widest(dtype))))",
        "jnp.sum(block.new(block.take(weights).astype(dtype)))",
        "tests/batch -k 'weights or half'",
    ),
    Breakage(
        "an example of two microbatches counts twice",
        "_batch/batch.py",
        "return jnp.where(is_new, values, jnp.asarray(other, values.dtype))",
        "return values",
        "tests/batch tests/maps",
    ),
    Breakage(
        "an example of two microbatches has its weight twice",
        "_batch/accumulators.py",
        "return rows, shares",
        "return rows, None",
        "tests/gradients",
    ),
    Breakage(
        "an accumulator sees one block past the stop",
        "_batch/loop.py",
        "functools.partial(lax.select, block.index < self.limit)",
        "functools.partial(lax.select, block.index <= self.limit)",
        "tests/maps/test_micro_vmap.py -k 'num_real or does_not_run'",
    ),
    Breakage(
        "only the remainder is checkpointed",
        "_batch/loop.py",
        "if self.checkpoint:",
        "if self.checkpoint and block.is_remainder:",
        "tests/maps/test_derivatives.py -k checkpoint",
    ),
    Breakage(
        "float16 inside of nested functions is not seen",
        "_base/jaxprs.py",
        "return any(uses_dtype(sub, dtype) for sub in inner)",
        "return any(uses_dtype(sub, dtype) for sub in inner if sub is None)",
        "tests/gradients -k '_float16 or range'",
    ),
    Breakage(
        "the cache of sizes ignores static arguments",
        "_batch/batch.py",
        "return tuple(leaves), treedef, tuple(static_leaves), static_treedef",
        "return tuple(leaves), treedef, static_treedef",
        "tests/batch/test_memory.py -k cache",
    ),
    Breakage(
        "an error names the memory of another block size",
        "_batch/batch.py",
        "        raise _too_small(budget, measured[1])",
        "        raise _too_small(budget, measured[min(16, largest)])",
        "tests/batch/test_memory.py -k impossible",
    ),
    Breakage(
        "gradients of devices are averaged, not added",
        "_base/mesh.py",
        "return lax.psum(x, tuple(missing)) if missing else x",
        "return lax.pmean(x, tuple(missing)) if missing else x",
        "tests/maps/test_sharding.py -k inside_of_shard_map",
    ),
    Breakage(
        "the last corner of a large matrix is not mirrored",
        "_base/platforms.py",
        "return jnp.minimum(jnp.arange(0, max(num, 1), max(size, 1)), num - size)",
        "return jnp.arange(0, num - size + 1, max(size, 1))",
        "tests/base/test_layout.py -k mirrored",
    ),
    Breakage(
        "what XLA for CPUs would merge is not kept apart",
        "_base/platforms.py",
        "return lax.cond(known, run, skip, *args)",
        "return run(*args)",
        "tests/base/test_layout.py -k apart",
    ),
    Breakage(
        "arrays are reshaped before they are written",
        "_kernels/engine.py",
        "leaves = [x[None] for x in materialised(leaves, always)]",
        "leaves = [x[None] for x in leaves]",
        "tests/kernels/test_reductions.py -k permute",
    ),
    Breakage(
        "programs read the memory of users after their calls",
        "_base/platforms.py",
        "if waits or any(isinstance(x, np.ndarray) for x in arrays):",
        "if waits:",
        "tests/base/test_platforms.py -k not_wait",
    ),
    Breakage(
        "programs with errors of the host are not waited for",
        "_base/platforms.py",
        'for name in ("callback", "noinline"))',
        "for name in ())",
        "tests/base/test_platforms.py -k of_the_host",
    ),
    Breakage(
        "convolutions in loops have channels first",
        "_base/platforms.py",
        "if jaxpr.effects or not _has_convolution(jaxpr):",
        "if True:",
        "tests/base/test_layout.py -k channels_last",
    ),
    # Sites: rules, contractions, curvature.
    Breakage(
        "padding before and after are exchanged in patches",
        "_base/platforms.py",
        "*((lo, hi, dil - 1) for (lo, hi), dil in padding)]",
        "*((hi, lo, dil - 1) for (lo, hi), dil in padding)]",
        "tests/sites/test_sites.py -k layer",
    ),
    Breakage(
        "negative tokens are taken for the first row",
        "_sites/site.py",
        "is_in = (tokens >= 0) & (tokens <= last)",
        "is_in = tokens <= last",
        "tests/sites/test_sites.py -k tokens",
    ),
    Breakage(
        "tokens without a row choose one that they share",
        "_sites/factors.py",
        "if site.rule.drops:",
        "if site.rule.drops and not site.rule.token:",
        "tests/sites -k use_by_factors",
    ),
    Breakage(
        "slices of different axes have no entry in common",
        "_sites/shared.py",
        "axis == same and (end <= first or last <= start)",
        "end <= first or last <= start",
        "tests/sites/test_sites.py -k slices",
    ),
    Breakage(
        "the order of axes in a reshape is ignored",
        "_sites/shared.py",
        "order = range(len(old)) if order is None else order",
        "order = range(len(old))",
        "tests/sites -k use_by",
    ),
    Breakage(
        "axes of a view inside of a scan are those of the whole leaf",
        "_sites/shared.py",
        "(None if axis is None else kept[num + axis] for axis in axes)",
        "(None if axis is None else kept[axis] for axis in axes)",
        "tests/sites -k use_by",
    ),
    Breakage(
        "a bias shares a cotangent that is not its own",
        "_sites/trace.py",
        "if uses[var] != 1:",
        "if uses[var] < 1:",
        "tests/sites/test_sites.py -k 'use_by or added or layer'",
    ),
    Breakage(
        "a reversed scan runs forwards",
        "_sites/trace.py",
        'reverse=params["reverse"],',
        "reverse=False,",
        "tests/sites -k 'use_by or layer'",
    ),
    Breakage(
        "what one branch has no derivative in, no branch has",
        "_base/jaxprs.py",
        "return [False, *map(any, by_input)]",
        "return [False, *map(all, by_input)]",
        "tests/sites/test_custom.py -k derivatives",
    ),
    Breakage(
        "constants in a backward pass are taken for linear",
        "_base/backward.py",
        "kind != OTHER if i in together else kind != LINEAR",
        "i in together or kind != LINEAR",
        "tests/sites/test_custom.py -k not_linear",
    ),
    Breakage(
        "sums in derivatives have no rule",
        "_base/jaxprs.py",
        "add_any entries linear sum :",
        "add_any entries linear :",
        "tests/sites/test_custom.py -k with_bias",
    ),
    Breakage(
        "a custom derivative is followed into second derivatives",
        "_sites/trace.py",
        "if self.order == 1 else reason",
        "if self.order else reason",
        "tests/sites/test_custom.py -k second",
    ),
    Breakage(
        "of two uses, the sign of the first is taken twice",
        "_curvature/by_sites.py",
        "block = block * (scale_of(site) * scale_of(other))",
        "block = block * (scale_of(site) * scale_of(site))",
        "tests/sites/test_forms.py -k curvature",
    ),
    Breakage(
        "a Gauss-Newton matrix by sites has no weights",
        "_curvature/by_sites.py",
        "scale = weight if scale is None else scale * weight",
        "scale = weight if scale is None else scale + 0 * weight",
        "tests/curvature/test_curvature_products.py -k ggn",
    ),
    Breakage(
        "a power of two that inputs are divided by is lost",
        "_gradients/per_example.py",
        "weights * power.astype(weights.dtype)",
        "weights",
        "tests/gradients -k '_float16 or range'",
    ),
    Breakage(
        "the product of two uses counts once in a norm",
        "_sites/gram.py",
        "yield terms, 2 * scale if is_norm and j > i else scale",
        "yield terms, scale",
        "tests/sites/test_sites.py -k use_by_factors",
    ),
    Breakage(
        "slopes of what is elementwise count once in a norm",
        "_sites/gram.py",
        "return [cotangent, *operand, *weights]",
        "return [cotangent, *operand]",
        "tests/sites/test_sites.py -k use_by_factors",
    ),
    Breakage(
        "a stack of layers has its factors at the first step",
        "_sites/site.py",
        "end = loop.start + loop.length",
        "loop, end = dataclasses.replace(loop, start=0), loop.length",
        "tests/sites -k 'stacked or Stacked'",
    ),
    Breakage(
        "checkpoints by the flags of JAX are not seen through",
        "_base/jaxprs.py",
        '"RematTraced": "checkpoint",',
        "",
        "tests/sites/test_flags.py",
    ),
    Breakage(
        "what is frozen is followed",
        "_base/jaxprs.py",
        "if name_of(eqn) in _FLAT:",
        'if name_of(eqn) in _FLAT - {"stop_gradient"}:',
        "tests/sites/test_patterns.py -k 'frozen or LoRA'",
    ),
    Breakage(
        "a function of each entry is one of all entries, as far as its rule goes",
        "_sites/shared.py",
        "if not (are_real and _are_alike(eqn, shape)):",
        "return are_real and _are_alike(eqn, shape)\n    if not are_real:",
        "tests/sites/test_shared.py",
    ),
    Breakage(
        "second derivatives of penalties are left out",
        "_curvature/by_sites.py",
        "if first in curved and second in curved:",
        "if first in curved and second in curved and first != second:",
        "tests/sites/test_patterns.py -k 'decay'",
    ),
    Breakage(
        "a diagonal is taken for all second derivatives of a penalty",
        "_curvature/by_sites.py",
        "if curved[first] and curved[second]:",
        "if curved[first] and curved[second] and first != second:",
        "tests/sites/test_patterns.py -k 'penalty'",
    ),
    # Transforms.
    Breakage(
        "squares may cancel with the mean",
        "_sites/gram.py",
        "flags.append(~(jnp.all(is_exact) & is_in_range))",
        "flags.append(~is_in_range)",
        "tests/gradients/test_statistics.py -k moments",
    ),
    Breakage(
        "equal tokens have a row each",
        "_sites/factors.py",
        "rows = jax.ops.segment_sum(d, first, total)",
        "rows = d",
        "tests/gradients/test_statistics.py -k tables",
    ),
    Breakage(
        "squares of factors may be out of range",
        "_sites/gram.py",
        "inverse = 2.0**spare / power",
        "inverse = 2.0**spare * jnp.ones_like(power)",
        "tests/gradients/test_statistics.py -k moments",
    ),
    Breakage(
        "the last group decides which examples are finite",
        "_gradients/per_example.py",
        "is_kept = functools.reduce(jnp.logical_and, finite)",
        "is_kept = finite[-1]",
        "tests/gradients -k 'finite or groups or nan_safe'",
    ),
    Breakage(
        "a remainder counts as a whole microbatch",
        "_batch/transform.py",
        "return jnp.minimum(count * blocks.size, blocks.total)",
        "return count * blocks.size",
        "tests/gradients -k 'moments or early_stop or noise'",
    ),
    Breakage(
        "`where` overrides `filter_spec`",
        "_batch/derivative.py",
        "x is not _OTHER and i in numbers",
        "(x is not _OTHER or where is not None) and i in numbers",
        "tests/curvature -k 'where or filter_spec'",
    ),
    Breakage(
        "a Taylor expansion has k in place of its factorial",
        "_curvature/directional.py",
        "x / float(math.factorial(k))",
        "x / max(k, 1)",
        "tests/ntk/test_approximate.py -k taylor",
    ),
    Breakage(
        "an operator of a Hessian is always that of a mean",
        "_curvature/operators.py",
        "for field in fields}",
        'for field in fields if field.name != "accumulator"}',
        "tests/curvature/test_operators.py",
    ),
    Breakage(
        "the axis of a grid that is named first is accumulated last",
        "_maps/grid_vmap.py",
        "for name, accumulator in reversed(reduced.items()):",
        "for name, accumulator in reduced.items():",
        "tests/maps/test_grid.py -k TestAccumulators",
    ),
    Breakage(
        "curvature that overflows is computed again without weights",
        "_batch/derivative.py",
        "ones = jnp.ones(size) if weights is None else weights",
        "ones = jnp.ones(size)",
        "tests/curvature/test_hessian_use.py -k RangeOfFloat16",
    ),
    # Kernels.
    Breakage(
        "all random models have the same dropout",
        "_ntk/traced_model.py",
        'kwargs["key"] = jr.fold_in(key, self.index)',
        'kwargs["key"] = key',
        "tests/ntk -k dropout",
    ),
    Breakage(
        "arguments in pairs do not make two sides",
        "_kernels/kernel.py",
        "second is None or second is first for first, second in pairs.values()",
        "True for _ in pairs",
        "tests/ntk tests/kernels -k 'keyword or pairs'",
    ),
    Breakage(
        "two sides with different static parts share a program",
        "_kernels/kernel.py",
        "return batch.treedef, shared, batch.axes, shapes",
        "return batch.treedef, batch.axes, shapes",
        "tests/ntk -k keyword",
    ),
    Breakage(
        "the neutral element of the largest is zero",
        "_kernels/reductions.py",
        "return -math.inf",
        "return 0.0",
        "tests/kernels -k largest",
    ),
    Breakage(
        "the sum so far keeps its scale when a larger part is added",
        "_batch/accumulators.py",
        "shrunk = jtu.tree_map(lambda x: x * shrinkage, self)",
        "shrunk = self",
        "tests/kernels/test_reductions.py -k out_of_range",
    ),
    Breakage(
        "the norm of a complex kernel has no imaginary part",
        "_kernels/reductions.py",
        "[jnp.real(tile), jnp.imag(tile)]",
        "[jnp.real(tile)]",
        "tests/kernels -k 'reductions and not mesh'",
    ),
    Breakage(
        "half of a complex kernel on disk is mirrored without conjugate",
        "_kernels/on_host.py",
        "return np.conj(np.swapaxes(self.stored[rows, columns], 0, 1))",
        "return np.swapaxes(self.stored[rows, columns], 0, 1)",
        "tests/kernels -k upper_only",
    ),
    Breakage(
        "rows on disk that have changed are not noticed",
        "_kernels/on_host.py",
        'return " ".join(self.digests[key] for key in keys)',
        'return ""',
        "tests/kernels/test_stored_examples.py -k resumed",
    ),
    Breakage(
        "rows of a panel on disk are read again for each column",
        "_kernels/on_host.py",
        "(x[0], x[1] // self._height) != panel",
        "(x[0], x[1] // self._height) == panel",
        "tests/kernels/test_stored_examples.py -k panel",
    ),
    Breakage(
        "the fingerprint ignores the second side",
        "_kernels/kernel.py",
        "inputs = self.sides, self.args, self.shared",
        "inputs = self.sides[:1], self.args, self.shared",
        "tests/kernels -k another_kernel",
    ),
    Breakage(
        "a NaN with its sign bit set is the smallest entry",
        "_kernels/reductions.py",
        "lax.top_k(_ranked(tile), min(self.k, columns.size))",
        "lax.top_k(tile, min(self.k, columns.size))",
        "tests/kernels/test_reductions.py -k equal_entries",
    ),
    Breakage(
        "reverse mode keeps all tiles of a product",
        "_kernels/engine.py",
        "x.reduction.is_sum",
        "False",
        "tests/kernels/test_reductions.py -k gradients_do_not",
    ),
    Breakage(
        "half of a kernel that is not symmetric is mirrored",
        "_kernels/kernel.py",
        "difference > rounding ** (1 / 3) * scale",
        "difference > scale",
        "tests/kernels/test_symmetry.py",
    ),
    Breakage(
        "devices for which no tile is left count one again",
        "_kernels/engine.py",
        "counts = [True] * len(tiles) + [False] * missing",
        "counts = [True] * (len(tiles) + missing)",
        "tests/kernels -k 'reductions and (mesh or devices)'",
    ),
    Breakage(
        "each panel leaves out the last of those that it meets",
        "_kernels/engine.py",
        "range(1, (grid.num_panels + 1) // 2)",
        "range(1, grid.num_panels // 2)",
        "tests/kernels/test_panels.py tests/ntk/test_empirical_use.py",
    ),
    Breakage(
        "each batch of samples is traced anew",
        "_ntk/monte_carlo.py",
        "first = jnp.asarray(start, jnp.int32)",
        "first = start",
        "tests/ntk -k traces",
    ),
    Breakage(
        "a standard error that is resumed is one of n in place of n - 1",
        "_ntk/monte_carlo.py",
        "** 2 * (num * (num - 1.0))",
        "** 2 * (num * (num - 0.0))",
        "tests/ntk -k previous",
    ),
    Breakage(
        "both sides of a kernel are multiplied by the whole metric",
        "_ntk/metric.py",
        "for times in (2 * is_first, 2 * (not is_first))",
        "for times in (2, 2)",
        "tests/ntk/test_metric.py -k roles",
    ),
    Breakage(
        "a metric may have negative entries",
        "_ntk/metric.py",
        "~jnp.all((wide >= 0) & jnp.isfinite(wide))",
        "~jnp.all(jnp.isfinite(wide))",
        "tests/wrong_calls -k EmpiricalNTK",
    ),
    Breakage(
        "stored features have the mask of another batch",
        "_ntk/empirical.py",
        "{name: (rows, None) for name, rows in kwargs.items()}",
        "{name: (rows[::-1], None) for name, rows in kwargs.items()}",
        "tests/ntk/test_metric.py -k disk",
    ),
    # Kronecker factors.
    Breakage(
        "Kronecker factors are not divided by the positions",
        "_curvature/kfac.py",
        "        count = weighing.sum() * positions",
        "        count = weighing.sum()",
        "tests/curvature/test_kfac.py -k Definition",
    ),
    Breakage(
        "Kronecker factors of experts are divided by all positions",
        "_curvature/kfac.py",
        "        count = jnp.sum(weighing.times(positions), 0)",
        "        count = weighing.sum() * uses[0].d.shape[2]",
        "tests/curvature/test_kfac_of_experts.py -k of_each_group",
    ),
    Breakage(
        "cotangents of one expert count for all",
        "_sites/kronecker.py",
        "(_times(x, met[0]) for x in (terms[0], terms[-1]))",
        "(_times(terms[0], met[0]), terms[-1])",
        "tests/curvature/test_kfac_of_experts.py -k of_each_group",
    ),
    Breakage(
        "rows of experts are also those of the expert before",
        "_base/ragged.py",
        "    return which[None] == jnp",
        "    return which[None] >= jnp",
        "tests/base/test_ragged.py -k any_inputs",
    ),
    Breakage(
        "merged uses of experts have the tokens of the first",
        "_sites/gram.py",
        "                of_which = [_stacked(of_which, 0)] if of_which else []",
        "                of_which = [_stacked(len(of_which) * of_which[:1], 0)]",
        "tests/sites/test_experts.py -k several_of_many",
    ),
    Breakage(
        "second derivatives of experts count all rows",
        "_sites/site.py",
        "x.is_complex or x.which is not None",
        "x.is_complex",
        "tests/sites/test_experts.py -k second -m matrix",
    ),
    Breakage(
        "reduced cotangents are a mean",
        "_curvature/kfac.py",
        "(jnp.sum(use.d, 2) for use in uses)",
        "(jnp.mean(use.d, 2) for use in uses)",
        "tests/curvature/test_kfac.py -k Definition",
    ),
    Breakage(
        "a bias is joined though it lacks axes of the outputs",
        "_sites/kronecker.py",
        "if axes is None or _present(axes, layout.shape) != wanted:",
        "if axes is None:",
        "tests/curvature/test_kfac.py",
    ),
    Breakage(
        "a bias has the axes of its weight in their order",
        "_sites/kronecker.py",
        "of_leaf = [label for _, labels in sorted(axes.items()) for label in labels]",
        "of_leaf = sorted(label for labels in axes.values() for label in labels)",
        "tests/curvature/test_kfac.py -k random",
    ),
    Breakage(
        "perturbations are moved back as they were moved",
        "_sites/trace.py",
        "jnp.transpose(y, sorted(range(len(order)), key=order.__getitem__))",
        "jnp.transpose(y, order)",
        "tests/sites/test_sites.py",
    ),
    Breakage(
        "roots are inverses",
        "_curvature/operators.py",
        "return self._positive()._with(lambda values: 1 / values)",
        "return self._positive()._with(lambda values: 1 / values**0.5)",
        "tests/curvature/test_kronecker_operator.py",
    ),
    # The check of rules.
    Breakage(
        "the check compares both sides without sites",
        "_check/explain.py",
        'method="sites" if by_sites else "materialise",',
        'method="materialise",',
        "tests/check/test_check.py -k broken",
    ),
    Breakage(
        "the check takes NaN for no error",
        "_check/explain.py",
        "differ[np.isnan(differ)] = np.inf",
        "differ[np.isnan(differ)] = 0.0",
        "tests/check/test_check.py",
    ),
    # Steps and states.
    Breakage(
        "the average of factors is biased towards zeros",
        "_steps/scale_by_kfac.py",
        "share = (1 - rate) / (1 - rate**num)",
        "share = (1 - rate) * num**0",
        "tests/steps/test_scale_by_kfac.py",
    ),
    Breakage(
        "inverses are computed anew in each update",
        "_steps/scale_by_kfac.py",
        "state.count % inverse_update_period == 0",
        "state.count >= 0",
        "tests/steps/test_scale_by_kfac.py",
    ),
    Breakage(
        "examples of two microbatches of a coupled loss count once",
        "_gradients/micro_grad.py",
        "couples = self.batched or self.axis_name is not None",
        "couples = self.batched",
        "tests/gradients/test_coupled_examples.py",
    ),
]

# Not imported, as the import hook of the tests must be there before.
_RUN = """
import importlib.util, pathlib, sys, pytest
found = pathlib.Path(importlib.util.find_spec("eqxbatch").origin)
if found.parents[1].resolve() != pathlib.Path.cwd().resolve():
    sys.exit(f"{found} would be imported, and not the copy")
sys.exit(pytest.main(sys.argv[1:]))
"""
_NOT_COPIED = shutil.ignore_patterns(
    ".git", "__pycache__", ".*_cache", "shared", "site"
)


def broken(breakage: Breakage, root: pathlib.Path) -> str:
    """The text of the broken file."""
    text = (root / "eqxbatch" / breakage.file).read_text()
    num = text.count(breakage.old)
    if num != 1:
        raise SystemExit(
            f"'{breakage.name}' is out of date: its old text is {num} times in "
            f"{breakage.file}, and must be there once."
        )
    return text.replace(breakage.old, breakage.new)


def outcome(arguments: list[str], root: pathlib.Path) -> str:
    """What pytest says of the copy, in a word or with the first test that fails."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-m", "not docs"]
    run = subprocess.run(
        [sys.executable, "-c", _RUN, *options, *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode == 0:
        return "SURVIVED"
    failed = re.search(r"^FAILED (.+?)(?: - .*)?$", run.stdout, re.M)
    if run.returncode == 1 and failed:
        return f"caught by {failed[1]}"
    # What cannot be imported or collected says nothing about the tests.
    shown = "\n".join([*run.stdout.splitlines()[-15:], *run.stderr.splitlines()[-15:]])
    return f"ERROR of the breakage itself (pytest returns {run.returncode}):\n{shown}"


def chosen(wanted: list[str]) -> list[tuple[int, Breakage]]:
    found = []
    for number, breakage in enumerate(BREAKAGES, 1):
        if not wanted or str(number) in wanted or breakage.name in wanted:
            found.append((number, breakage))
    known = {str(number) for number, _ in found} | {b.name for _, b in found}
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"No such breakage: {unknown}. See --list.")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("breakages", nargs="*", help="numbers or names; default: all")
    parser.add_argument("--tests", nargs="+", help="tests in place of the named ones")
    parser.add_argument("--list", action="store_true", help="show all, and run none")
    options = parser.parse_args()
    some = chosen(options.breakages)
    for _, breakage in some:
        broken(breakage, ROOT)
    if options.list:
        for number, breakage in some:
            print(f"{number:2} {breakage.file}: {breakage.name}")
        return
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder) / "checkout"
        shutil.copytree(ROOT, root, ignore=_NOT_COPIED)
        for number, breakage in some:
            file = root / "eqxbatch" / breakage.file
            file.write_text(broken(breakage, ROOT))
            # Python must not take what it compiled before for this.
            os.utime(file, (number, number))
            begin = time.monotonic()
            tests = " ".join(options.tests) if options.tests else breakage.tests
            found = outcome(shlex.split(tests), root)
            outcomes.append(found.split()[0])
            seconds = time.monotonic() - begin
            print(f"{number:2} {breakage.name}: {found} ({seconds:.0f} s)", flush=True)
            shutil.copy2(ROOT / "eqxbatch" / breakage.file, file)
    counts = [outcomes.count(word) for word in ("caught", "SURVIVED", "ERROR")]
    print("{} caught, {} survived, {} errors".format(*counts))
    sys.exit(1 if counts[1] or counts[2] else 0)


if __name__ == "__main__":
    main()
