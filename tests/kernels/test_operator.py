"""Kernels as linear operators: computed, in memory, on disk."""

import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import matfree.decomp
import matfree.funm
import numpy as np
import pytest
import zarr
from jax.sharding import AxisType

from eqxbatch import (
    EmpiricalNTK,
    filter_batch_kernel,
    HostStore,
    kernel_solve,
    KernelOperator,
    ZarrStore,
)
from eqxbatch._kernels import stored_matrix
from ..helpers import bent, make_mesh, normal, spread, thinned, variants
from .kernel_functions import lopsided, rbf, white


pytestmark = pytest.mark.usefixtures("x64_in_all_threads")


@pytest.fixture
def x64_in_all_threads():
    """With 64-bit types in callbacks, too, which run in threads of their own."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def hermitian(x1, x2=None):
    x2 = x1 if x2 is None else x2
    phase = x1[:, None, 1] - x2[None, :, 1]
    k = rbf(x1, x2)
    return jax.lax.complex(k * jnp.cos(phase), k * jnp.sin(phase))


X, Y = numbers(13, 3), numbers(7, 3, seed=1)
# By name: what the operator is of, and the dense kernel.
KERNELS = {
    "symmetric": ((rbf, X), {"symmetric": True}),
    "not known to be": ((rbf, X), {}),
    "lopsided": ((lopsided, X), {}),
    "rectangle": ((rbf, X, Y), {}),
    "tall": ((lopsided, Y, X), {}),
    "Hermitian": ((hermitian, X), {"symmetric": True}),
    "noise": ((white, X), {"symmetric": True}),
}


def dense(kernel, *examples):
    return np.asarray(jax.jit(kernel)(*examples))


def close(got, expected):
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-10, atol=1e-12)


def stores(where, path):
    return {
        "all at once": "device",
        "computed": "device",
        "host": HostStore(),
        "zarr": ZarrStore(path),
    }[where]


# Each kernel and each place at least once.
SOME = (
    ("symmetric", "zarr"),
    ("symmetric", "computed"),
    ("not known to be", "host"),
    ("lopsided", "all at once"),
    ("rectangle", "zarr"),
    ("tall", "host"),
    ("Hermitian", "zarr"),
    ("noise", "host"),
)
CASES = [
    (name, where)
    for name in KERNELS
    for where in ("all at once", "computed", "host", "zarr")
    # Each kernel in blocks; each place with a symmetric kernel.
    if where == "computed" or name == "symmetric" or (name, where) in SOME
]


# The lowest version of JAX lets NumPy copy.
@pytest.mark.cpu
@pytest.mark.matrix
def test_examples_are_copied_once():
    """By JAX, and not by NumPy before."""
    x = np.ones((1000, 1000))
    tracemalloc.start()
    try:
        operator = KernelOperator(rbf, x, block_size=10, symmetric=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < x.nbytes / 2
    # The owner may change them.
    x[:] = 2.0
    close(operator.matrix.call.sides[0].x, np.ones((1000, 1000)))


@pytest.mark.versions
@pytest.mark.parametrize(
    ("name", "where"), variants(CASES, *(case for case in CASES if case not in SOME))
)
def test_is_the_kernel(name, where, tmp_path):
    of, settings = KERNELS[name]
    size = None if where == "all at once" else 4
    store = stores(where, tmp_path)
    operator = KernelOperator(*of, block_size=size, store=store, **settings)
    matrix = dense(*of)
    n1, n2 = matrix.shape
    vectors = numbers(n2, 2, seed=2).astype(matrix.dtype)
    back = jnp.asarray(numbers(n1, 2, seed=3), matrix.dtype)
    close(operator.mv(vectors), matrix @ vectors)
    vectors = jnp.asarray(vectors)
    close(operator.mv(vectors), matrix @ vectors)
    close(operator.mv(matrix[0].conj()), matrix @ matrix[0].conj())
    columns = eqx.filter_jit(lambda operator, v: jax.vmap(operator.mv, 1, 1)(v))
    close(columns(operator, vectors), matrix @ vectors)
    transposed = operator.transpose()
    close(transposed.mv(back), matrix.T @ back)
    close(transposed.transpose().mv(vectors), matrix @ vectors)
    for one, two in ((operator, matrix), (transposed, matrix.T)):
        close(one.as_matrix(), two)
        close(one.diagonal(), np.diagonal(two))
        close(lineax.diagonal(one), np.diagonal(two))
        assert one.in_structure().shape == two.shape[1:]
        assert one.out_structure().shape == two.shape[:1]
        assert one.in_structure().dtype == two.dtype
        for index in (0, 5, two.shape[1] - 1):
            close(one.column(index), two[:, index])
    is_symmetric = name in ("symmetric", "noise")
    assert lineax.is_symmetric(operator) == is_symmetric
    assert (transposed is operator) == is_symmetric
    assert not lineax.is_diagonal(operator)
    close(lineax.materialise(operator).as_matrix(), matrix)


@pytest.mark.versions
@pytest.mark.parametrize(
    ("where", "name"), thinned(("computed", "host"), ("lopsided", "rectangle"))
)
def test_products_have_derivatives(name, where, tmp_path):
    of, settings = KERNELS[name]
    store = stores(where, tmp_path)
    operator = KernelOperator(*of, block_size=4, store=store, **settings)
    matrix = dense(*of)
    vectors = jnp.asarray(numbers(matrix.shape[1], 2, seed=2))
    loss = lambda v: jnp.sum(operator.mv(v) ** 2)

    @jax.jit
    def derivatives(vectors):
        gradient, pushed = jax.jvp(jax.grad(loss), (vectors,), (vectors,))
        by_column = jax.vmap(jax.grad(loss), 1, 1)(vectors)
        product = jax.jvp(operator.mv, (vectors,), (vectors,))[1]
        return product, gradient, pushed, by_column

    product, *gradients = derivatives(vectors)
    close(product, matrix @ vectors)
    for gradient in gradients:
        close(gradient, 2 * matrix.T @ (matrix @ vectors))


@pytest.mark.versions
def test_stored_kernels(tmp_path):
    matrix = dense(rbf, X)
    stored = filter_batch_kernel(
        rbf, block_size=4, symmetric=True, store=ZarrStore(tmp_path)
    )(jnp.asarray(X))
    vectors = jnp.asarray(numbers(13, 2))
    for array in (matrix, jnp.asarray(matrix), stored):
        for symmetric in (None, True):
            operator = KernelOperator(array, symmetric=symmetric)
            close(operator.mv(vectors), matrix @ vectors)
            assert operator.matrix.is_hermitian == (symmetric is True)
    # Only the blocks on and above the diagonal are read.
    for row in range(1, 4):
        for column in range(row):
            (tmp_path / "kernel" / "c" / str(row) / str(column)).unlink()
    half = KernelOperator(zarr.open_array(str(tmp_path / "kernel")), symmetric=True)
    close(half.mv(vectors), matrix @ vectors)
    close(half.column(2), matrix[:, 2])
    close(half.column(12), matrix[:, 12])


def test_columns_of_a_stored_estimator_are_read():
    ntk = EmpiricalNTK(eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)))
    operators = [
        KernelOperator(kernel, X, block_size=4, symmetric=is_symmetric, store="host")
        for kernel, is_symmetric in ((ntk, None), (rbf, True))
    ]
    expected = [x.as_matrix() for x in operators]
    for operator, matrix in zip(operators, expected, strict=True):
        close(operator.column(5), matrix[:, 5])
        operator.matrix.reader.array[:] = 0
    # The factors of all examples would take longer than to read the tiles. A function
    # of the examples takes less, and what is traced may be differentiated.
    close(operators[0].column(5), np.zeros(13))
    close(operators[1].column(5), expected[1][:, 5])
    for operator, matrix in zip(operators, expected, strict=True):
        close(eqx.filter_jit(operator.column)(jnp.array(5)), matrix[:, 5])
    # Without a store, the factors of all examples are shared by many columns.
    for is_symmetric in (None, False):
        computed = KernelOperator(ntk, X, block_size=4, symmetric=is_symmetric)
        column_of = computed.matrix.columns()
        for index in (0, 5, 12):
            got = column_of(jnp.array(index, jnp.int32))
            np.testing.assert_array_equal(got, computed.column(index))
            close(got, expected[0][:, index])


@pytest.mark.versions
def test_narrow_dtypes():
    vector = jnp.ones(13, jnp.float32)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32):
        matrix = np.asarray(jnp.asarray(8 * dense(rbf, X), dtype))
        with jax.numpy_dtype_promotion("standard"):
            got = KernelOperator(matrix, symmetric=True).mv(vector)
        expected = matrix.astype(np.float64) @ np.ones(13)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_the_other_byte_order():
    matrix = dense(rbf, X)
    swapped = matrix.astype(matrix.dtype.newbyteorder("S"))
    operator = KernelOperator(swapped, symmetric=True)
    close(operator.mv(jnp.ones(13)), matrix @ np.ones(13))
    close(operator.as_matrix(), matrix)
    close(operator.diagonal(), np.diagonal(matrix))
    close(operator.column(4), matrix[:, 4])
    close(eqx.filter_jit(operator.column)(jnp.array(4)), matrix[:, 4])


SOLVERS = {
    "CG": lineax.CG(1e-13, 1e-13),
    "GMRES": lineax.GMRES(1e-13, 1e-13, restart=13),
}


@pytest.mark.versions
@pytest.mark.parametrize(
    ("where", "solver"),
    variants(
        [(where, solver) for where in ("computed", "zarr") for solver in SOLVERS],
        *(("computed", "GMRES"), ("zarr", "GMRES")),
    ),
)
def test_solvers_of_lineax(where, solver, tmp_path):
    kernel = KernelOperator(
        rbf,
        jnp.asarray(X),
        block_size=4,
        symmetric=True,
        store=stores(where, tmp_path),
        tags=lineax.positive_semidefinite_tag,
    )
    assert lineax.is_positive_semidefinite(kernel)
    ridge = 0.1 * lineax.IdentityLinearOperator(kernel.in_structure())
    ridged = lineax.TaggedLinearOperator(
        kernel + ridge, lineax.positive_semidefinite_tag
    )
    y = jnp.asarray(numbers(13))
    inverse = np.linalg.inv(dense(rbf, X) + 0.1 * np.eye(13))

    def first(y):
        solution = lineax.linear_solve(ridged, y, SOLVERS[solver]).value
        return solution[0], solution

    gradient, solution = jax.jit(jax.grad(first, has_aux=True))(y)
    np.testing.assert_allclose(solution, inverse @ y, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(gradient, inverse[0], rtol=1e-9, atol=1e-10)


@pytest.mark.matrix
def test_log_likelihood_of_a_gaussian_process():
    """Against the one by a Cholesky decomposition, with its gradient."""
    x, y = jnp.asarray(X), jnp.asarray(numbers(13))

    def ridged(log_scale):
        kernel = KernelOperator(
            rbf, x, block_size=5, symmetric=True, scale=jnp.exp(log_scale)
        )
        ridged = kernel + 0.5 * lineax.IdentityLinearOperator(kernel.in_structure())
        return lineax.TaggedLinearOperator(ridged, lineax.positive_semidefinite_tag)

    def solved(log_scale):
        solver = lineax.CG(1e-13, 1e-13)
        weights = lineax.linear_solve(ridged(log_scale), y, solver).value
        # With as many steps as rows, and unit vectors, Lanczos is exact.
        tridiagonal = matfree.decomp.tridiag_sym(13, reortho="full")
        logdet = matfree.funm.monte_carlo_funm_sym_logdet(tridiagonal)
        product = lambda v, log_scale: ridged(log_scale).mv(v)
        each = jax.vmap(lambda v: logdet(product, v, log_scale))(jnp.eye(13))
        return -y @ weights / 2 - jnp.sum(each) / 2

    def exact(log_scale):
        matrix = rbf(x, scale=jnp.exp(log_scale)) + 0.5 * jnp.eye(13)
        factor = jnp.linalg.cholesky(matrix)
        half = jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        return -half @ half / 2 - jnp.sum(jnp.log(jnp.diagonal(factor)))

    at = jnp.array(0.3)
    got, gradient = jax.jit(jax.value_and_grad(solved))(at)
    expected, wanted = jax.jit(jax.value_and_grad(exact))(at)
    np.testing.assert_allclose(got, expected, rtol=1e-9)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6)


def test_kernels_of_models(getkey, tmp_path):
    model = bent(3, 2, getkey())
    ntk = EmpiricalNTK(model)
    matrix = np.asarray(ntk(jnp.asarray(X)))
    vectors = jnp.asarray(numbers(13, 2))
    for settings in (
        {"block_size": 5},
        {"block_size": 5, "store": ZarrStore(tmp_path)},
    ):
        operator = KernelOperator(ntk, jnp.asarray(X), **settings)
        assert operator.matrix.is_hermitian
        close(operator.mv(vectors), matrix @ vectors)
        close(operator.diagonal(), np.diagonal(matrix))
        close(operator.column(12), matrix[:, 12])
    models = lambda model, v: KernelOperator(
        EmpiricalNTK(model), jnp.asarray(X), block_size=5
    ).mv(v)
    gradient = eqx.filter_grad(lambda model: jnp.sum(models(model, jnp.ones(13))))
    whole = eqx.filter_grad(lambda m: jnp.sum(EmpiricalNTK(m)(jnp.asarray(X))))
    both = eqx.filter_jit(lambda model: (gradient(model), whole(model)))(model)
    for one, two in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-8, atol=1e-10)


@pytest.mark.devices
@pytest.mark.versions
def test_on_a_mesh(tmp_path):
    mesh = make_mesh(AxisType.Auto)
    x, y = jnp.asarray(X), jnp.asarray(Y)
    vectors = jnp.asarray(numbers(13, 2))
    operator = KernelOperator(rbf, x, block_size=2, symmetric=True, mesh=mesh)
    matrix = dense(rbf, X)
    close(operator.mv(vectors), matrix @ vectors)
    close(operator.as_matrix(), matrix)
    close(operator.diagonal(), np.diagonal(matrix))
    rectangle = KernelOperator(rbf, x, y, block_size=2, mesh=mesh)
    close(rectangle.transpose().mv(vectors), dense(rbf, X, Y).T @ vectors)
    store = ZarrStore(tmp_path)
    stored = KernelOperator(
        rbf, x, block_size=2, symmetric=True, mesh=mesh, store=store
    )
    close(stored.mv(vectors), matrix @ vectors)


@pytest.mark.devices
@pytest.mark.parametrize("axis_type", spread((AxisType.Explicit, AxisType.Auto), 1))
def test_a_store_while_a_mesh_is_set(axis_type):
    mesh = make_mesh(axis_type)
    settings = {"block_size": 2, "symmetric": True, "store": HostStore()}
    with jax.set_mesh(mesh):
        for own in ({}, {"mesh": mesh}):
            operator = KernelOperator(rbf, jnp.asarray(X), **settings, **own)
            close(operator.as_matrix(), dense(rbf, X))


@pytest.mark.cpu
def test_no_copies_of_the_kernel():
    """A product needs memory for blocks, not for the kernel."""
    x = jnp.zeros((2048, 3))
    vector = jnp.zeros(2048)

    def temporaries(block_size):
        operator = KernelOperator(rbf, x, block_size=block_size, symmetric=True)
        run = jax.jit(lambda vector: operator.mv(vector))
        compiled = run.lower(vector).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    blocked, whole = temporaries(128), temporaries(None)
    assert whole > 2048 * 2048 * 8
    assert blocked < whole / 20


@pytest.mark.versions
def test_an_operator_is_an_argument_of_compiled_functions():
    """Of the same program for other examples; a stored kernel is not copied into it."""
    traces = []

    @eqx.filter_jit
    def run(operator, vector):
        traces.append(None)
        return operator.mv(vector)

    for seed in (0, 1):
        x = numbers(13, 3, seed=seed)
        operator = KernelOperator(rbf, x, block_size=4, symmetric=True)
        close(run(operator, jnp.ones(13)), dense(rbf, x) @ np.ones(13))
    assert len(traces) == 1
    stored = KernelOperator(dense(rbf, X))
    close(run(stored, jnp.ones(13)), dense(rbf, X) @ np.ones(13))
    close(run(stored, jnp.zeros(13)), np.zeros(13))
    assert len(traces) == 2
    assert not any(map(eqx.is_array, jax.tree.leaves(stored)))


@pytest.mark.parametrize(
    ("read", "match"),
    (
        (lambda x: np.ma.array(x, mask=x > 0.5), "must not have masked entries"),
        # NumPy would take one row for all.
        (lambda x: x[:1], r"Slices of a stored kernel must be \(13, 13\); got \(1, 13"),
    ),
)
def test_entries_that_are_missing(read, match):
    class Stored:
        shape, dtype = (13, 13), X.dtype

        def __getitem__(self, place):
            return read(dense(rbf, X).astype(X.dtype)[place])

    stored = KernelOperator(Stored())
    for run in (lambda: stored.mv(jnp.ones(13)), stored.as_matrix):
        with pytest.raises(Exception, match=match):
            run()


@pytest.mark.parametrize("symmetric", (None, True))
def test_small_matrices_are_read_once(symmetric, monkeypatch):
    matrix, reads = dense(hermitian, X), []

    class Stored:
        shape, dtype, chunks = (13, 13), matrix.dtype, (4, 4)

        def __getitem__(self, place):
            reads.append(place)
            return matrix[place]

    num = 16 if symmetric is None else 10
    for is_small, expected in ((True, num), (False, 2 * num + 4)):
        if not is_small:
            monkeypatch.setattr(stored_matrix, "_KEPT_BYTES", 16 * 13**2 - 1)
        reads.clear()
        operator = KernelOperator(Stored(), symmetric=symmetric)
        for num_vectors in (2, 1):
            vectors = jnp.asarray(numbers(13, num_vectors), matrix.dtype)
            close(operator.mv(vectors), matrix @ vectors)
        # Its last entries are mirror images.
        close(operator.column(5), matrix[:, 5])
        assert len(reads) == expected


@pytest.mark.parametrize("symmetric", (None, True))
def test_tiles_that_are_kept_belong_to_what_reads_them(symmetric):
    # Tiles on the diagonal are square, also if those of products are not.
    for seed in range(20):
        rng = np.random.default_rng(seed)
        rows, columns = rng.integers(1, 12, 2)
        matrix = rng.normal(size=(rows, rows if symmetric else columns))
        if symmetric:
            matrix += matrix.T

        class Stored:
            shape, dtype = matrix.shape, matrix.dtype
            chunks = tuple(map(int, rng.integers(1, 8, 2)))

            def __getitem__(self, place, matrix=matrix):
                return matrix[place]

        operator = KernelOperator(Stored(), symmetric=symmetric)
        vectors = rng.normal(size=(matrix.shape[1], 2))
        checks = [
            lambda o, m, v: close(o.diagonal(), np.diagonal(m)),
            lambda o, m, v: close(o.mv(v), m @ v),
            lambda o, m, v: close(o.as_matrix(), m),
            lambda o, m, v: close(o.column(0), m[:, 0]),
        ]
        for number in rng.permutation(4):
            checks[number](operator, matrix, vectors)


def random_features(x1, x2=None, *, key, mask):
    """A kernel of random features, which differ if there are two sides."""
    x2 = x1 if x2 is None else x2
    first, second = (
        jax.vmap(lambda x, k: x["a"] * jax.random.normal(k))(x, keys) * rows[:, None]
        for x, keys, rows in zip((x1, x2), key, mask, strict=True)
    )
    return first @ second.T


@pytest.mark.parametrize(
    ("array", "has_pair"),
    spread([(f, pair) for f in (np.array, jnp.array) for pair in (True, False)], 1),
)
def test_examples_that_are_given_twice(array, has_pair):
    """Are one side, also within a compiled function and as NumPy arrays."""
    x, mask, key = {"a": array(X)}, array(X[:, 0]), array(jax.random.PRNGKey(0))
    settings = {"block_size": 4, "symmetric": True}
    keys = (key, key) if has_pair else key
    matrix = filter_batch_kernel(random_features, **settings)(
        x, key=keys, mask=(mask, mask)
    )
    operator = KernelOperator(
        random_features, x, x, key=keys, mask=(mask, mask), **settings
    )
    assert operator.matrix.is_hermitian
    vectors = numbers(13, 2)
    run = eqx.filter_jit(lambda operator, vectors: operator.mv(vectors))
    for got in (
        operator.mv(vectors),
        run(operator, vectors),
        operator.matrix.product(vectors),
    ):
        close(got, matrix @ vectors)
    if array is np.array:
        x["a"][:] = 0
        close(operator.mv(vectors), matrix @ vectors)


def several_outputs(x1, x2=None):
    k = rbf(x1, x2)
    return jnp.stack([k, k], axis=-1)


def two_arrays(x1, x2=None):
    k = rbf(x1, x2)
    return k, k


@pytest.mark.parametrize(
    ("make", "error", "match"),
    (
        (lambda x: KernelOperator(several_outputs, x), ValueError, "shape .n1, n2."),
        (lambda x: KernelOperator(two_arrays, x), ValueError, "one array of shape"),
        (lambda x: KernelOperator(rbf), TypeError, "must be a kernel function with"),
        (lambda x: KernelOperator(np.ones(3)), ValueError, "must have the two axes"),
        (
            lambda x: KernelOperator(np.ones((3, 2)), symmetric=True),
            ValueError,
            "must be square; got shape .3, 2.",
        ),
        (
            lambda x: KernelOperator(np.ones((3, 3)), block_size=2),
            ValueError,
            "takes no other settings than .*got `block_size`",
        ),
        (
            lambda x: KernelOperator(rbf, x, store="disk"),
            ValueError,
            "`store` must be",
        ),
        (
            lambda x: KernelOperator(rbf, x, tags=lineax.lower_triangular_tag),
            ValueError,
            "must not be triangular",
        ),
        (
            lambda x: KernelOperator(rbf, x).mv(jnp.ones(4)),
            ValueError,
            "`vector` must have 13 rows, as the kernel has 13 columns; got shape .4,.",
        ),
        (
            lambda x: KernelOperator(rbf, x).column(13),
            ValueError,
            "one of the 13 columns; got 13",
        ),
        (
            lambda x: KernelOperator(rbf, x, block_size=0),
            ValueError,
            "`block_size` must be at least 1",
        ),
        (
            lambda x: kernel_solve(KernelOperator(rbf, x), x[:, 0], ridge=0.1),
            ValueError,
            "must be of a symmetric kernel",
        ),
    ),
)
def test_wrong_operators(make, error, match):
    with pytest.raises(error, match=match):
        make(jnp.asarray(X))


class Antisymmetric(eqx.Module):
    """Half of it is known from the other half, which is no transpose."""

    def __call__(self, x1, x2=None):
        x2 = x1 if x2 is None else x2
        return x1[:, None, 0] - x2[None, :, 0]

    @property
    def symmetric(self):
        return lambda block: -block.T


@pytest.mark.parametrize("store", ("device", HostStore()))
def test_kernels_that_are_symmetric_in_another_way(store):
    operator = KernelOperator(
        Antisymmetric(), jnp.asarray(X), block_size=4, store=store
    )
    matrix = dense(Antisymmetric(), X)
    assert not operator.matrix.is_hermitian
    vectors = jnp.asarray(numbers(13, 2))
    close(operator.mv(vectors), matrix @ vectors)
    close(operator.transpose().mv(vectors), matrix.T @ vectors)


def test_an_empty_kernel():
    operator = KernelOperator(rbf, jnp.zeros((0, 3)), block_size=4, symmetric=True)
    assert operator.mv(jnp.zeros((0, 2))).shape == (0, 2)
    assert operator.diagonal().shape == (0,)
    stored = KernelOperator(np.zeros((0, 0)), symmetric=True)
    assert stored.mv(jnp.zeros((0, 2))).shape == (0, 2)
    assert stored.diagonal().shape == (0,)


def test_normal_is_used(getkey):
    # Single precision, as most users have it.
    x = normal(getkey(), (9, 3)).astype(jnp.float32)
    operator = KernelOperator(rbf, x, block_size=4, symmetric=True, store=HostStore())
    got = operator.mv(jnp.ones(9, jnp.float32))
    assert got.dtype == jnp.float32
    expected = dense(rbf, x).astype(np.float64) @ np.ones(9)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def twisted(x1, x2=None):
    """A complex kernel that is neither symmetric nor Hermitian."""
    x2 = x1 if x2 is None else x2
    return jax.lax.complex(rbf(x1, x2), jnp.sin(x1[:, None, 0] + 2 * x2[None, :, 1]))


@pytest.mark.versions
@pytest.mark.parametrize("store", spread((HostStore(), "device"), 1))
def test_conjugates_of_complex_kernels(store):
    operator = KernelOperator(twisted, X, Y, block_size=4, store=store)
    matrix = dense(twisted, X, Y)
    conjugate = lineax.conj(operator)
    for one, two in (
        (conjugate, matrix.conj()),
        (conjugate.transpose(), matrix.conj().T),
        (lineax.conj(operator.transpose()), matrix.conj().T),
        (lineax.conj(conjugate), matrix),
    ):
        vectors = jnp.asarray(numbers(two.shape[1], 2), two.dtype)
        close(one.mv(vectors), two @ vectors)
        close(one.as_matrix(), two)
        close(one.diagonal(), np.diagonal(two))
        close(one.column(2), two[:, 2])


# The lowest version of lineax has neither solver.
@pytest.mark.matrix
@pytest.mark.parametrize("store", ("device", HostStore()))
def test_least_squares_of_complex_kernels(store):
    operator = KernelOperator(twisted, X, Y, block_size=4, store=store)
    matrix = dense(twisted, X, Y)
    right = jnp.asarray(numbers(13), matrix.dtype)
    solution = np.linalg.lstsq(matrix, right)[0]
    for solver in (
        lineax.Normal(lineax.CG(rtol=1e-12, atol=1e-12)),
        lineax.LSMR(rtol=1e-12, atol=1e-12),
    ):
        found = lineax.linear_solve(operator, right, solver).value
        np.testing.assert_allclose(found, solution, rtol=1e-6)


@pytest.mark.versions
def test_what_lineax_knows_without_a_tag():
    one = KernelOperator(rbf, X[:1])
    assert lineax.is_diagonal(one)
    assert not lineax.is_diagonal(KernelOperator(rbf, X[:1], Y))
    for kernel in (rbf, hermitian):
        tagged = KernelOperator(kernel, X, tags=lineax.positive_semidefinite_tag)
        assert lineax.is_symmetric(tagged) == (kernel is rbf)
        assert (tagged.transpose() is tagged) == (kernel is rbf)
    diagonal = KernelOperator(rbf, X, tags=lineax.diagonal_tag)
    assert lineax.is_tridiagonal(diagonal)
    assert lineax.is_symmetric(diagonal)
