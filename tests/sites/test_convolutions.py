"""Gradients of kernels of convolutions, formed from patches of input and cotangent."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from jax import lax

from ..conftest import enable_x64
from ..helpers import assert_same
from .adapter import Sites


pytestmark = [pytest.mark.versions, pytest.mark.usefixtures("x64")]
NUM = 3


@dataclasses.dataclass(frozen=True)
class Convolution:
    """Sizes, and the axes that the gradient is formed from.

    - `sizes`: inputs, outputs, sizes of the image, and of the kernel.
    - `a`, `d`: the axes of the operand and of the cotangent.
    """

    sizes: tuple[int, int, tuple[int, ...], tuple[int, ...]]
    a: str
    d: str
    strides: Sequence[int] = ()
    padding: Sequence[tuple[int, int]] = ()
    steps: Sequence[int] = ()
    holes: Sequence[int] = ()
    groups: int = 1
    batch: int = 1
    dtype: type = jnp.float64

    @property
    def num_axes(self) -> int:
        return len(self.sizes[2])

    @property
    def image(self) -> tuple[int, ...]:
        return (self.batch, self.sizes[0] * self.groups, *self.sizes[2])

    @property
    def kernel(self) -> tuple[int, ...]:
        return (self.sizes[1] * self.groups, self.sizes[0], *self.sizes[3])

    def __call__(self, kernel, image):
        ones = (1,) * self.num_axes
        return lax.conv_general_dilated(
            image,
            kernel,
            self.strides or ones,
            self.padding or [(1, 1)] * self.num_axes,
            self.holes or ones,
            self.steps or ones,
            feature_group_count=self.groups,
        )


WIDE, FEW = 8, 3
CONVOLUTIONS = {
    "the window is shared": Convolution(
        (WIDE, WIDE, (6, 9), (3, 3)), "n t0 t1 k0 i", "n t0 t1 k1 o"
    ),
    "a batch of its own": Convolution(
        (WIDE, WIDE, (5, 6), (3, 2)), "n t0 t1 k0 i", "n t0 t1 k1 o", batch=2
    ),
    "few outputs have the whole window": Convolution(
        (4 * WIDE, 1, (5, 6), (3, 3)), "n t0 t1 i", "n o k0 k1 t0 t1"
    ),
    "few inputs have the whole window": Convolution(
        (1, WIDE, (5, 6), (3, 3)), "n i k0 k1 t0 t1", "n t0 t1 o"
    ),
    "one axis has strides": Convolution(
        (WIDE, WIDE, (7, 9), (3, 3)), "n t0 t1 k0 i", "n t0 t1 k1 o", strides=(2, 1)
    ),
    "strides": Convolution(
        (WIDE, WIDE, (13, 13), (3, 3)), "n t0 t1 k0 k1 i", "n t0 t1 o", strides=(2, 2)
    ),
    "gaps in the kernel": Convolution(
        (WIDE, WIDE, (9, 9), (3, 3)),
        "n t0 t1 k1 i",
        "n t0 t1 k0 o",
        steps=(1, 2),
        padding=[(2, 0), (1, 3)],
    ),
    "gaps in the image, and a part of it": Convolution(
        (WIDE, WIDE, (6, 8), (3, 3)),
        "n t0 t1 k1 i",
        "n t0 t1 k0 o",
        holes=(2, 1),
        padding=[(-1, 2), (3, -2)],
    ),
    "groups": Convolution(
        (FEW, FEW, (6, 9), (3, 3)), "n g i k0 t0 t1", "n g o k1 t0 t1", groups=2
    ),
    "one axis": Convolution((WIDE, 1, (11,), (4,)), "n t0 i", "n o k0 t0"),
    "three axes": Convolution(
        (WIDE, WIDE, (3, 4, 5), (2, 2, 2)),
        "n t0 t1 t2 k0 k1 i",
        "n t0 t1 t2 k2 o",
        padding=[(0, 1)] * 3,
    ),
    "complex": Convolution(
        (WIDE, WIDE, (4, 6), (3, 3)),
        "n t0 t1 k0 i",
        "n t0 t1 k1 o",
        dtype=jnp.complex128,
    ),
}


@pytest.fixture(scope="module")
def compared():
    """Gradients and Jacobians of all kernels, in one program, and what JAX says."""
    with enable_x64():
        return _compared([*CONVOLUTIONS.values()])


def _compared(convolutions):
    keys = iter(jr.split(jr.key(0), 2 * len(convolutions)))
    kernels = [jr.normal(next(keys), x.kernel, x.dtype) for x in convolutions]
    images = [jr.normal(next(keys), (NUM, *x.image), x.dtype) for x in convolutions]

    def outputs(kernels, images):
        total = jnp.zeros(2)
        for convolution, *pair in zip(convolutions, kernels, images, strict=True):
            out = convolution(*pair)
            # No two entries count alike.
            weights = jnp.linspace(-1, 2, out.size).reshape(out.shape)
            both = [jnp.sum(jnp.sin(out.real) * weights), jnp.sum(abs(out) ** 2)]
            total += jnp.stack(both)
        return [total]

    sites = Sites.of(outputs, kernels, [x[0] for x in images])

    @jax.jit
    def run(kernels, images):
        found = sites.examples(kernels, images, with_jacobians=True)
        jacobian = jax.jacrev(lambda *args: outputs(*args)[0])
        truth = jax.vmap(jacobian, (None, 0))(kernels, images)
        numbers = range(len(kernels))
        gradients = [found.gradients(i) for i in numbers]
        return gradients, [found.jacobians(i) for i in numbers], truth

    return sites, *run(kernels, images)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_kernels(compared, name):
    sites, gradients, jacobians, truth = compared
    number = [*CONVOLUTIONS].index(name)
    convolution = CONVOLUTIONS[name]
    assert sites.formed_from(number) == (convolution.a, convolution.d)
    assert_same(jacobians[number], truth[number])
    assert_same(gradients[number], jnp.sum(truth[number], 1))
