"""Kernels in blocks, their reductions and stores."""

from .breakage import Breakage


BREAKAGES = [
    Breakage(
        "vectors of a product may have any number of rows",
        "KernelProduct.init",
        "check_equal(what, vectors.shape[0], kernel.shape[1], remedy)",
        "check_equal(what, vectors.shape[0], vectors.shape[0], remedy)",
        "tests/wrong_calls -k KernelProduct",
    ),
    Breakage(
        "arrays are reshaped before they are written",
        "_reduced",
        "materialised(leaves, always)",
        "leaves",
        "tests/kernels/test_reductions.py -k permute",
    ),
    Breakage(
        "arguments in pairs do not make two sides",
        "Examples.split",
        "(x is None or x is first for first, x in pairs.values())",
        "(True for _ in pairs)",
        "tests/ntk tests/kernels -k 'keyword or pairs'",
    ),
    Breakage(
        "two sides with different static parts share a program",
        "Side.type",
        "batch.treedef, shared, batch.axes, shapes",
        "batch.treedef, batch.axes, shapes",
        "tests/ntk -k keyword",
    ),
    Breakage(
        "the neutral element of the largest is zero",
        "TopK.neutral",
        "return -math.inf",
        "return 0.0",
        "tests/kernels -k largest",
    ),
    Breakage(
        "the norm of a complex kernel has no imaginary part",
        "Norm.including",
        "[jnp.real(tile), jnp.imag(tile)]",
        "[jnp.real(tile)]",
        "tests/kernels -k 'reductions and not mesh'",
    ),
    Breakage(
        "a column of a complex kernel on disk is mirrored without conjugate",
        "Reader.column",
        "np.concatenate([column, _numpy_conj(below)])",
        "np.concatenate([column, below])",
        "tests/kernels -k is_the_kernel",
    ),
    Breakage(
        "rows on disk that have changed are not noticed",
        "_Blocks.source",
        '" ".join(self.digests[key] for key in keys)',
        '""',
        "tests/kernels/test_stored_examples.py -k resumed",
    ),
    Breakage(
        "rows of a panel on disk are read again for each column",
        "_Blocks._block",
        "(x[0], x[1] // self._height) != panel",
        "(x[0], x[1] // self._height) == panel",
        "tests/kernels/test_stored_examples.py -k panel",
    ),
    Breakage(
        "the fingerprint ignores the second side",
        "CalledKernel.parts",
        "self.call.sides, self.call.args, self.call.shared",
        "self.call.sides[:1], self.call.args, self.call.shared",
        "tests/kernels -k another_kernel",
    ),
    Breakage(
        "a NaN with its sign bit set is the smallest entry",
        "TopK.update",
        "_ranked(tile)",
        "tile",
        "tests/kernels/test_reductions.py -k equal_entries",
    ),
    Breakage(
        "reverse mode keeps all tiles of a product",
        "Tiles._recomputes_updates",
        "x.reduction.is_sum",
        "False",
        "tests/kernels/test_reductions.py -k gradients_do_not",
    ),
    Breakage(
        "half of a kernel that is not symmetric is mirrored",
        "is_close",
        "rounding ** (1 / 3) * scale",
        "scale",
        "tests/kernels/test_symmetry.py",
    ),
    Breakage(
        "devices for which no tile is left count one again",
        "_reduced",
        "[True] * len(tiles) + [False] * missing",
        "[True] * (len(tiles) + missing)",
        "tests/kernels -k 'reductions and (mesh or devices)'",
    ),
    Breakage(
        "each panel leaves out the last of those that it meets",
        "Tiles.with_panel",
        "grid.num_panels + 1",
        "grid.num_panels",
        "tests/kernels/test_panels.py tests/ntk/test_empirical_use.py",
    ),
]
