"""Hessians, Gauss-Newton matrices, Kronecker factors and operators."""

from .breakage import Breakage


BREAKAGES = [
    Breakage(
        "of two uses, the sign of the first is taken twice",
        "AbstractSiteMatrix._of_leaves",
        "scale_of(other)",
        "scale_of(site)",
        "tests/sites/test_forms.py -k curvature",
    ),
    Breakage(
        "a Gauss-Newton matrix by sites has no weights",
        "SiteGaussNewton.factors",
        "jax.vmap(jnp.multiply)(curve, weights)",
        "curve",
        "tests/curvature/test_curvature_products.py -k ggn",
    ),
    Breakage(
        "second derivatives of penalties are left out",
        "_with_curved",
        "first in curved and second in curved",
        "first in curved and second in curved and first != second",
        "tests/sites/test_patterns.py -k 'decay'",
    ),
    Breakage(
        "a diagonal is taken for all second derivatives of a penalty",
        "_with_curved",
        "curved[first] and curved[second]",
        "curved[first] and curved[second] and first != second",
        "tests/sites/test_patterns.py -k 'penalty'",
    ),
    Breakage(
        "a Taylor expansion has k in place of its factorial",
        "TaylorExpansion.__call__",
        "float(math.factorial(k))",
        "max(k, 1)",
        "tests/ntk/test_approximate.py -k taylor",
    ),
    Breakage(
        "an operator of a Hessian is always that of a mean",
        "_AbstractCurvatureOperator._evaluated",
        "{field.name: getattr(self._product, field.name) for field in fields}",
        "{field.name: getattr(self._product, field.name) for field in fields "
        'if field.name != "accumulator"}',
        "tests/curvature/test_operators.py",
    ),
    Breakage(
        "Kronecker factors are not divided by the positions",
        "_role_sums",
        "weighing.sum() * positions",
        "weighing.sum()",
        "tests/curvature/test_kfac.py -k Definition",
    ),
    Breakage(
        "Kronecker factors of experts are divided by all positions",
        "_role_sums",
        "jnp.sum(weighing.times(positions), 0)",
        "weighing.sum() * uses[0].d.shape[2]",
        "tests/curvature/test_kfac_of_experts.py -k of_each_group",
    ),
    Breakage(
        "reduced cotangents are a mean",
        "_role_sums",
        "jnp.sum(use.d, 2)",
        "jnp.mean(use.d, 2)",
        "tests/curvature/test_kfac.py -k Definition",
    ),
    Breakage(
        "roots are inverses",
        "KroneckerOperator.inverse",
        "lambda values: 1 / values",
        "lambda values: 1 / values**0.5",
        "tests/curvature/test_kronecker_operator.py",
    ),
    Breakage(
        "rows of a Jacobian have no weights",
        "JacobianMatrix._rows",
        "(curve, example.weights)",
        "(curve,)",
        "tests/curvature/test_few_parameters.py -k 'weights and row'",
    ),
    Breakage(
        "a Jacobian is that of all devices",
        "JacobianMatrix.sums",
        "vary_as([*self.leaves, *rows.arrays], self.leaves)",
        "self.leaves",
        "tests/curvature/test_few_parameters.py -k 'shard_map and row'",
    ),
    Breakage(
        "blocks of a Jacobian's matrix all start at its first leaf",
        "JacobianMatrix.sums",
        "slice(self._starts[of_part[0]], self._starts[of_part[-1] + 1])",
        "slice(0, self._starts[of_part[-1] + 1] - self._starts[of_part[0]])",
        "tests/curvature/test_few_parameters.py -k parts",
    ),
    Breakage(
        "a bias has an input of one at derivatives, too",
        "uses_of",
        "not biases or site.perturbation in biased",
        "True",
        "tests/curvature/test_kfac_of_derivatives.py -k 'factors or biases'",
    ),
    Breakage(
        "the mean of a bias's inputs is one",
        "_role_sums",
        "sum(use.bias * use.d.shape[2] for use in uses) / max(positions, 1)",
        "1.0",
        "tests/curvature/test_kfac_of_derivatives.py -k factors",
    ),
    Breakage(
        "every product with a constant is a position",
        "_has_positions",
        "is_single or not all(site.is_of_constant for site in sites)",
        "True",
        "tests/curvature/test_kfac_of_derivatives.py -k no_position",
    ),
    Breakage(
        "what nested derivatives compute again counts twice",
        "without_repeats",
        "merged if repeats else closed",
        "closed",
        "tests/curvature/test_kfac_of_derivatives.py -k factors",
    ),
]
