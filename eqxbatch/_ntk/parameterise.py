"""The NTK parameterisation, in which kernels have infinite-width limits."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, Key, UInt32

from .._base.checks import no_arrays_remedy
from .._base.trees import shown
from .._base.types import check_fields, checked


_Model = TypeVar("_Model")


_LAYERS = (eqx.nn.Linear, eqx.nn.Conv, eqx.nn.ConvTranspose)


class NTKLayer(eqx.Module):
    """A layer in NTK parameterisation; see [`eqxbatch.ntk_parameterise`][].

    - `layer`: the layer, whose weight and bias are initially standard normal.
    - `weight_scale`, `bias_scale`: the factors of weight and bias in the forward pass.
    """

    layer: Callable
    weight_scale: float = eqx.field(static=True)
    bias_scale: float = eqx.field(static=True)

    __check_init__ = check_fields

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer with scaled weights."""
        return self.scaled(x, *args, **kwargs)

    @property
    def scaled(self) -> Callable:
        """The layer with scales multiplied into its weight and bias."""
        scales = self.weight_scale, self.bias_scale
        # A layer without a bias leaves its scale.
        pairs = zip(_parameters(self.layer), scales, strict=False)
        return eqx.tree_at(_parameters, self.layer, [x * scale for x, scale in pairs])


def _parameters(layer: Any) -> list:
    """The weight and the bias, if there is one."""
    return [x for x in (layer.weight, layer.bias) if x is not None]


@checked
def ntk_parameterise(
    model: _Model,
    *,
    weight_std: float = 1.0,
    bias_std: float = 0.0,
    key: Key[Array, ""] | UInt32[Array, "2"],
) -> _Model:
    """Re-initialises a model in the NTK parameterisation.

    Every `equinox.nn.Linear`, `equinox.nn.Conv` and `equinox.nn.ConvTranspose` of the
    model becomes an [`eqxbatch.results.NTKLayer`][], whose weights `W` and biases `b`
    are standard normal and whose forward pass is

    ```
    weight_std / sqrt(fan_in) * (W @ x) + bias_std * b
    ```

    where `fan_in` is the number of weights of an output channel. As layers get wider,
    the NNGP kernel and the NTK of such a model, averaged over random draws, tend to
    limits that depend only on its architecture. Everything else in the model is
    unchanged.

    **Arguments:**

    - `model`: a PyTree that contains such layers.
    - `weight_std`, `bias_std`: the standard deviations that weights and biases
        contribute to the pre-activations. `sqrt(2)` and 0 preserve the magnitude of
        signals in ReLU networks.
    - `key`: the random key, from which each layer gets its own.

    **Returns:**

    The model with new layers of the same shapes and dtypes.

    **Raises:**

    `ValueError` if the model has no such layers, or if a standard deviation is negative
    or not finite. `TypeError` if a standard deviation is not a number, or if `key` is
    not a random key.

    !!! example

        ```python
        >>> import equinox as eqx, eqxbatch, jax, jax.numpy as jnp
        >>> def init(key):
        ...     mlp = eqx.nn.MLP(2, 3, 16, 2, key=key)
        ...     return eqxbatch.ntk_parameterise(mlp, weight_std=1.4, key=key)
        >>> init(jax.random.key(0))(jnp.ones(2)).shape
        (3,)

        ```

    ??? cite

        The parameterisation is due to [Jacot, Gabriel and Hongler,
        2018](https://arxiv.org/abs/1806.07572); for its limits, see [Lee et al.,
        2019](https://arxiv.org/abs/1902.06720) and, for convolutions, [Arora et al.,
        2019](https://arxiv.org/abs/1904.11955).
    """
    for name, std in (("weight_std", weight_std), ("bias_std", bias_std)):
        if not (math.isfinite(std) and std >= 0):
            raise ValueError(f"`{name}` must be finite and not negative; got {std}.")
    # Layers are taken as leaves, so that everything between them is left as it is.
    is_layer = lambda x: isinstance(x, _LAYERS)
    nodes, treedef = jtu.tree_flatten(model, is_leaf=is_layer)
    if not any(map(is_layer, nodes)):
        raise ValueError(
            "`model` must have layers of `equinox.nn.Linear`, `equinox.nn.Conv` or "
            f"`equinox.nn.ConvTranspose`; got {shown(model)}. Initialise other models "
            f"by their own scheme.{no_arrays_remedy(model)}"
        )
    # The number of a leaf gives each layer a key of its own, also for equal layers.
    nodes = [
        _drawn(node, weight_std, bias_std, jr.fold_in(key, number))
        if is_layer(node)
        else node
        for number, node in enumerate(nodes)
    ]
    return jtu.tree_unflatten(treedef, nodes)


def _drawn(layer: Any, weight_std: float, bias_std: float, key: Any) -> NTKLayer:
    # Axis 0 has the output channels: of `Linear`, `Conv` and `ConvTranspose` alike.
    keys = jr.split(key)
    fan_in = math.prod(layer.weight.shape[1:])
    pairs = zip(keys, _parameters(layer), strict=False)
    parameters = [jr.normal(key, x.shape, x.dtype) for key, x in pairs]
    drawn = eqx.tree_at(_parameters, layer, parameters)
    # Layers without inputs have weights without entries, of any scale.
    return NTKLayer(drawn, weight_std / math.sqrt(max(fan_in, 1)), bias_std)
