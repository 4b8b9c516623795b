#!/usr/bin/env bash
# A jitted program of constants alone is folded to wrong numbers: a convolution with half of
# another convolution, whose batch and feature axes are exchanged.
#
# Expected: the numbers of the same program with these arrays as arguments, to rounding.
# Seen: errors as large as the results, in float32 and float64, without a warning. If one of the
# two arrays is an argument, or if the division is left out, the numbers are right.
# JAX 0.7.2 and 0.8.0 do so on CPUs; 0.8.2, 0.9.0.1 and 0.12.0.1 do not.
# Guessed before: folding evaluates each operation as it is written.
# Source: the libraries themselves. https://github.com/openxla/xla/issues/34260 is a report of
# wrong folding in the same releases, for a lookup and a sum.
#
# Exits with 0 as long as this is so. It needs Python 3.11, 3.12 or 3.13.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet jax==0.7.2 jaxlib==0.7.2 numpy==2.3.3
JAX_PLATFORMS=cpu "$folder/env/bin/python" - <<'PROGRAM'
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

jax.config.update("jax_enable_x64", True)
EXCHANGED = lax.ConvDimensionNumbers((1, 0, 2, 3), (1, 0, 2, 3), (1, 0, 2, 3))


def convolved(images, cotangents):
    """The images, with half of the gradient of a kernel of 2 x 2 pixels."""
    kernel = lax.conv_general_dilated(
        images, cotangents, (1, 1), "VALID", dimension_numbers=EXCHANGED
    )
    return lax.conv(images, kernel / 2, (1, 1), "VALID")


def by_numpy(images, cotangents):
    corners = [(i, j) for i in range(2) for j in range(2)]
    cut = lambda i, j: images[:, :, i : i + 4, j : j + 3]
    out = 0.0
    for corner in corners:
        kernel = np.einsum("nohw,nchw->oc", cotangents, cut(*corner)) / 2
        out = out + np.einsum("nchw,oc->nohw", cut(*corner), kernel)
    return out


rng = np.random.default_rng(0)
arrays = rng.normal(size=(4, 2, 5, 4)), rng.normal(size=(4, 3, 4, 3))
for dtype in ("float64", "float32"):
    images, cotangents = (jnp.asarray(x.astype(dtype)) for x in arrays)
    expected = by_numpy(*arrays)
    error = lambda out: float(np.max(np.abs(np.asarray(out) - expected)))
    of_arguments = error(jax.jit(convolved)(images, cotangents))
    of_constants = error(jax.jit(lambda: convolved(images, cotangents))())
    size = float(np.max(np.abs(expected)))
    print(jax.__version__, dtype, of_arguments, of_constants, "of", size)
    assert of_arguments < 1e-5 * size and of_constants > 0.5 * size
PROGRAM
