"""How much work a job is at least: the FLOPs of its products, counted from shapes.

`Products` has those of one example, from the program of the loss or the model, with
loops counted in full. The functions below it say what an algorithm needs of these for
all examples. A contraction counts as the cheaper one of those that are known. So the
numbers are lower bounds: what is no product of matrices counts nothing.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex

from eqxbatch._base.jaxprs import inner_programs
from eqxbatch._base.versions import scan_sizes


# What a value depends on: the first two, and the depths of the loops whose trips have
# another one each.
PARAMETERS, DATA = "parameters", "data"
Depends = frozenset[str | int]
NOTHING: Depends = frozenset()


@dataclasses.dataclass(frozen=True)
class Site:
    """A product of a parameter and the data of one example.

    - `inputs`, `outputs`: the two sizes of the parameter.
    - `positions`: how often one example uses it: pixels, tokens or steps.
    - `num`: how many such parameters there are, such as the layers of a loop.
    - `is_inner`: whether the data depend on other parameters, so that their derivative
        is needed, too.
    - `is_last`: whether the result is the output of the program, up to what is added.
    """

    inputs: int
    outputs: int
    positions: int = 1
    num: int = 1
    is_inner: bool = True
    is_last: bool = False

    @property
    def size(self) -> int:
        return self.num * self.inputs * self.outputs

    @property
    def flops(self) -> float:
        return 2.0 * self.positions * self.size


@dataclasses.dataclass(frozen=True)
class Products:
    """The products in the program of one example.

    - `sites`: those of a parameter and the data.
    - `others`: the FLOPs of all others, and `others_back` those of their gradients.
    - `shared`: the FLOPs of products of parameters alone, once for all examples.
    - `is_known`: whether the trips of all loops are.
    """

    sites: tuple[Site, ...] = ()
    others: float = 0.0
    others_back: float = 0.0
    shared: float = 0.0
    is_known: bool = True

    @property
    def forward(self) -> float:
        return sum(site.flops for site in self.sites) + self.others

    @property
    def weights(self) -> float:
        """The FLOPs of the gradients of parameters, from those of outputs of sites."""
        return sum(site.flops for site in self.sites)

    @property
    def back(self) -> float:
        """The FLOPs of the gradients of the outputs of sites.

        Those of a last site are its parameter.
        """
        inner = [x for x in self.sites if x.is_inner and not x.is_last]
        return sum(site.flops for site in inner) + self.others_back

    @property
    def gradient(self) -> float:
        """The FLOPs of the gradient of a loss, with the loss."""
        return self.forward + self.back + self.weights

    def __add__(self, other: "Products") -> "Products":
        return Products(
            self.sites + other.sites,
            self.others + other.others,
            self.others_back + other.others_back,
            self.shared + other.shared,
            self.is_known and other.is_known,
        )


def products_of(fun: Callable, model: Any, *data: Any) -> Products:
    """The products of `fun(model, *example)`, for an example of some data."""
    is_parameter = lambda x: (
        eqx.is_inexact_array(x) or isinstance(x, jax.ShapeDtypeStruct)
    )
    parameters, static = eqx.partition(model, is_parameter)
    shaped = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    example = jax.tree.map(shaped, data)
    run = lambda parameters, example: fun(eqx.combine(parameters, static), *example)
    program = jax.make_jaxpr(run)(parameters, example).jaxpr
    num = len(jax.tree.leaves(parameters))
    num_data = len(program.invars) - num
    ins = [frozenset({PARAMETERS})] * num + [frozenset({DATA})] * num_data
    return count(program, ins, [True] * len(program.outvars)).products


@dataclasses.dataclass(frozen=True)
class Counted:
    """The products of a program, and what its results depend on."""

    products: Products
    outs: list[Depends]


# What hands the derivative of an output of the program on as it is.
PASSES = ("add", "add_any", "reshape", "squeeze", "transpose", "convert_element_type")


def count(
    program: Any,
    ins: Sequence[Depends],
    are_last: Sequence[bool],
    lengths: tuple[int, ...] = (),
) -> Counted:
    """Walks through a jaxpr, whose inputs depend on `ins`.

    - `are_last`: which of its outputs are those of the whole program.
    - `lengths`: the trips of the loops around it, the outermost one first.
    """
    is_variable = lambda atom: not isinstance(atom, jex.Literal)
    outs = zip(program.outvars, are_last, strict=True)
    last = {x for x, is_last in outs if is_last and is_variable(x)}
    for eqn in reversed(program.eqns):
        if eqn.primitive.name in PASSES and not last.isdisjoint(eqn.outvars):
            last |= set(filter(is_variable, eqn.invars))
    known = dict(zip(program.invars, ins, strict=True))

    def read(atom: Any) -> Depends:
        return known.get(atom, NOTHING) if is_variable(atom) else NOTHING

    total = Products()
    for eqn in program.eqns:
        of_inputs = [read(atom) for atom in eqn.invars]
        of_last = [x in last for x in eqn.outvars]
        found = _equation(eqn, of_inputs, of_last, lengths)
        total += found.products
        known.update(zip(eqn.outvars, found.outs, strict=True))
    return Counted(total, [read(atom) for atom in program.outvars])


def _equation(
    eqn: Any, ins: list[Depends], are_last: list[bool], lengths: tuple[int, ...]
) -> Counted:
    name, inner = eqn.primitive.name, [x.jaxpr for x in inner_programs(eqn)]
    if name == "scan":
        return _scan(eqn, inner[0], ins, lengths)
    if name == "cond":
        # The cheapest branch, because this is a lower bound.
        branches = [count(x, ins[1:], are_last, lengths) for x in inner]
        return min(branches, key=lambda branch: branch.products.forward)
    if len(inner) == 1 and len(inner[0].invars) == len(ins):
        return count(inner[0], ins, are_last, lengths)
    union = NOTHING.union(*ins)
    total = Products()
    if name in SIZES:
        total = _product(SIZES[name](eqn), ins, any(are_last), lengths)
    for program in inner:
        # Most likely a `while`, which has at least one trip.
        of_inputs = [union] * len(program.invars)
        found = count(program, of_inputs, [False] * len(program.outvars), lengths)
        total += dataclasses.replace(found.products, is_known=False)
    return Counted(total, [union] * len(eqn.outvars))


def _scan(eqn: Any, body: Any, ins: list[Depends], lengths: tuple[int, ...]) -> Counted:
    """All trips: each one uses the same parameters, or has its own slices of them."""
    num_consts, num_carry = scan_sizes(eqn)
    first, depth = num_consts + num_carry, len(lengths)
    carry = ins[num_consts:first]
    slices = [x | {depth} for x in ins[first:]]
    are_last = [False] * len(body.outvars)
    while True:
        inside = [*ins[:num_consts], *carry, *slices]
        found = count(body, inside, are_last, (*lengths, eqn.params["length"]))
        # A trip hands on what the one before it was made of.
        after = [a | b for a, b in zip(carry, found.outs[:num_carry], strict=True)]
        if after == carry:
            return Counted(found.products, [x - {depth} for x in found.outs])
        carry = after


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Those of a product of two arrays: how many rows each has, and their length.

    - `num`: how many such products an equation has.
    """

    lhs: int
    rhs: int
    length: int
    num: int

    @property
    def flops(self) -> float:
        return 2.0 * self.num * self.lhs * self.rhs * self.length


def _dot(eqn: Any) -> Sizes:
    lhs, rhs = (x.aval for x in eqn.invars)
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    length = math.prod(lhs.shape[i] for i in contracted)
    num = math.prod(lhs.shape[i] for i in batch)
    # A contraction of an empty axis has no rows to count.
    each = max(num * length, 1)
    return Sizes(lhs.size // each, rhs.size // each, length, num)


def _convolution(eqn: Any) -> Sizes:
    """That of the patches of an image and the filters, in groups of channels."""
    filters, out = eqn.invars[1].aval, eqn.outvars[0].aval
    num_filters = filters.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    num = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
    length = filters.size // num_filters
    return Sizes(out.size // num_filters, num_filters // num, length, num)


SIZES: dict[str, Callable[[Any], Sizes]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
}


def _product(
    sizes: Sizes, ins: list[Depends], is_last: bool, lengths: tuple[int, ...]
) -> Products:
    """An equation with a product, in all trips of the loops around it."""
    flops = sizes.flops * math.prod(lengths)
    lhs, rhs = (ins[0], sizes.lhs), (ins[1], sizes.rhs)
    if not any(DATA in x for x in ins):
        return Products(shared=flops)
    if _is_parameter(ins[0]):
        (parameter, outputs), (other, positions) = lhs, rhs
    elif _is_parameter(ins[1]):
        (parameter, outputs), (other, positions) = rhs, lhs
    else:
        # The gradient of either factor takes as many FLOPs as the product.
        back = flops * sum(PARAMETERS in x for x in ins)
        return Products(others=flops, others_back=back)
    # Loops that slice the parameter have one for each trip; others use it in each trip.
    num = math.prod(x for i, x in enumerate(lengths) if i in parameter)
    site = Site(
        sizes.length,
        outputs,
        positions * math.prod(lengths) // num,
        sizes.num * num,
        is_inner=PARAMETERS in other,
        is_last=is_last,
    )
    return Products((site,))


def _is_parameter(x: Depends) -> bool:
    return PARAMETERS in x and DATA not in x


# What algorithms need, for `num` examples.


def mapped(products: Products, num: int) -> float:
    """The outputs of a model."""
    return num * products.forward + products.shared


def accumulated(products: Products, num: int) -> float:
    """The mean gradient of a loss."""
    return num * products.gradient + 3 * products.shared


def projected(products: Products, num: int, dim: int) -> float:
    """The FLOPs of an accumulated gradient and of projections of all gradients.

    Each direction is a product of one for the inputs and one for the outputs of a
    weight, which meet its factors at each position, or the gradient of an example.
    """
    each = lambda x: min(x.positions * (x.inputs + x.outputs), x.inputs * x.outputs)
    directions = sum(2.0 * dim * x.num * each(x) for x in products.sites)
    return accumulated(products, num) + num * directions


def clipped(products: Products, num: int) -> float:
    """The same of clipped gradients: also their norms.

    They come from two Gram matrices over the positions, or from the gradient itself,
    which is then also what is summed.
    """

    def norm(site: Site) -> float:
        gram = 2.0 * site.num * site.positions**2 * (site.inputs + site.outputs)
        return min(gram, 4.0 * site.size)

    return accumulated(products, num) + num * sum(map(norm, products.sites))


def moments(products: Products, num: int) -> float:
    """The mean gradient, and the mean of squares of gradients.

    With one position, the latter is a product of squared factors. With many, it is the
    sum of squares of gradients that are formed.
    """
    return accumulated(products, num) + num * sum(2.0 * x.size for x in products.sites)


def factors(products: Products, num: int, directions: int) -> float:
    """The inputs of all sites, and the derivatives of some outputs by theirs."""
    return num * (products.forward + directions * products.back)


def kernel(
    products: Products,
    num: int,
    others: int = 0,
    *,
    outputs: int = 1,
    traced: bool = True,
    tiles: int | None = None,
) -> float:
    """The NTK of examples with themselves, or with some others.

    A site's share is a product of Gram matrices over positions, or of gradients that
    are formed. The derivatives of the last site are an identity.

    - `outputs`: how many numbers the model returns.
    - `traced`: whether the kernel is their sum, or has all pairs of them.
    - `tiles`: how many entries are computed; by default, all of them.
    """
    pairs = tiles or num * (others or num)
    squared = outputs if traced else outputs**2

    def contraction(site: Site) -> float:
        of_cotangents = 0 if site.is_last else squared * site.outputs
        gram = site.num * site.positions**2 * (site.inputs + of_cotangents)
        formed = squared * site.size
        forming = (num + others) * outputs * site.flops
        return min(2.0 * pairs * gram, 2.0 * pairs * formed + forming)

    made = factors(products, num + others, outputs)
    return made + sum(map(contraction, products.sites))


def upper_tiles(num: int, size: int) -> int:
    """How many entries the blocks on and above the diagonal of a kernel have."""
    return num * (num + min(size, num)) // 2


def preconditioned(products: Products, num: int, outputs: int) -> float:
    """The inverses of Kronecker factors, times the factors of some examples."""

    def products_with(site: Site) -> float:
        sizes = site.inputs**2 + (0 if site.is_last else outputs) * site.outputs**2
        return 2.0 * num * site.num * site.positions * sizes

    return sum(map(products_with, products.sites))


def covariances(products: Products, num: int, outputs: int) -> float:
    """The variances of all outputs of examples, and their covariances, in a metric.

    This is the diagonal of a kernel, from factors or from gradients that are formed.
    """

    def block(site: Site) -> float:
        squared = outputs**2
        gram = site.num * site.positions**2 * (site.inputs + squared * site.outputs)
        turned = site.positions * (site.inputs**2 + outputs * site.outputs**2)
        by_factors = 2.0 * gram + 2.0 * site.num * turned
        formed = outputs * (site.flops + 2.0 * site.size * (site.inputs + site.outputs))
        return min(by_factors, formed + 2.0 * squared * site.size)

    return factors(products, num, outputs) + num * sum(map(block, products.sites))


def kfac(products: Products, num: int, directions: int) -> float:
    """Kronecker factors: the second moments of the inputs and the cotangents of sites.

    - `directions`: how many cotangents an example has: a drawn one, or all.
    """

    def moments(site: Site) -> float:
        sizes = site.inputs**2 + directions * site.outputs**2
        return 2.0 * num * site.num * site.positions * sizes

    return factors(products, num, directions) + sum(map(moments, products.sites))


def kfac_size(products: Products) -> int:
    """How many numbers they have."""
    return sum(x.num * (x.inputs**2 + x.outputs**2) for x in products.sites)


def ggn_diagonal(products: Products, num: int, outputs: int) -> float:
    """The diagonal of a Gauss-Newton matrix, with a direction for each output."""

    def squares(site: Site) -> float:
        # With one position, the squares of cotangents are summed over outputs first.
        forming = outputs * site.flops if site.positions > 1 else 0.0
        return num * (forming + 2.0 * site.size)

    return factors(products, num, outputs) + sum(map(squares, products.sites))


def hessian(products: Products, num: int) -> float:
    """The Hessian of the mean of a loss, from the sites of all examples.

    The derivative of a cotangent by the output of a site is that of all entries of the
    parameter, up to inputs. There is one for each output and position, or for each
    entry, if these are fewer. By symmetry, half of the blocks are enough.
    """
    directions = sum(
        x.num * min(x.positions * x.outputs, x.inputs * x.outputs)
        for x in products.sites
    )
    # Forwards and backwards again: half of the sites, because the others are before.
    again = directions * (products.forward + products.back) / 2

    def block(a: Site, b: Site) -> float:
        # One term has second derivatives; the other, those of inputs by what is before.
        return 2.0 * a.size * b.size * min(a.positions, b.positions)

    blocks = sum(block(a, b) for a in products.sites for b in products.sites)
    return num * (products.gradient + again + blocks)


def solve(size: int) -> float:
    """A Cholesky decomposition."""
    return size**3 / 3
