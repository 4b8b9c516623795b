"""Products, solves and averages that several processes compute together."""

import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from benchmarks.local import free_port
from ..flags import COMPILE_FAST
from ..on_cpu import environment


pytestmark = pytest.mark.cpu


BEGIN = """
    import os, sys
    import jax
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    rank, num, port, path = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    jax.distributed.initialize(
        f"127.0.0.1:{port}", num, rank, heartbeat_timeout_seconds=10
    )
    import equinox as eqx, jax.numpy as jnp, numpy as np
    import eqxbatch

    def rbf(x, y=None):
        y = x if y is None else y
        return jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, axis=-1))

    class Tiles:
        # A stored kernel; it counts its tiles, and may fail.
        def __init__(self, array, fails=False, error=OSError):
            self.array, self.num, self.fails, self.error = array, 0, fails, error
            self.shape, self.dtype, self.chunks = array.shape, array.dtype, (8, 8)

        def __getitem__(self, index):
            self.num += 1
            if self.fails:
                raise self.error("no disk")
            return self.array[index]

    class Stops(eqxbatch.AbstractProgressMeter):
        after: int
        def start(self, num_products, num_done):
            return 0
        def step(self, state, num_nans, residual=0.0):
            if state + 1 == self.after:
                raise KeyboardInterrupt
            return state + 1
        def close(self, state):
            pass

    def error_of(run):
        try:
            run()
        except BaseException as e:
            return f"{type(e).__name__}: {e}"
        return "none"

    random = np.random.default_rng(0)
    x, y = (random.standard_normal((45, k)).astype(np.float32) for k in (3, 2))
    dense = np.asarray(rbf(jnp.asarray(x)), np.float64)
    exact = np.linalg.solve(dense + 0.5 * np.eye(45), y)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((num,), ("rows",), axis_types=auto)
    settings = {"symmetric": True, "mesh": mesh}
"""


TOGETHER = """
    operator = eqxbatch.KernelOperator(rbf, x, block_size=8, **settings)
    np.testing.assert_allclose(operator.mv(y), dense @ y, rtol=1e-4, atol=1e-5)
    solution = eqxbatch.kernel_solve(operator, y, ridge=0.5)
    np.testing.assert_allclose(solution.weights, exact, rtol=1e-3, atol=1e-4)

    tiles = Tiles(dense.astype(np.float32))
    stored = eqxbatch.KernelOperator(tiles, **settings)
    np.testing.assert_allclose(stored.mv(y), dense @ y, rtol=1e-4, atol=1e-5)
    print("tiles", tiles.num, flush=True)

    def solve(name, operator=stored, y=y, **more):
        return eqxbatch.kernel_solve(
            operator,
            y,
            ridge=0.5,
            preconditioner_rank=2,
            checkpoint=f"{path}/{name}",
            **more,
        )

    whole = solve("whole")
    np.testing.assert_allclose(whole.weights, exact, rtol=1e-5, atol=1e-6)
    np.save(f"{path}/weights_{rank}.npy", whole.weights)
    print("stopped", error_of(lambda: solve("stopped", progress=Stops(3))), flush=True)
    np.testing.assert_array_equal(solve("stopped").weights, whole.weights)
    print("other", error_of(lambda: solve("stopped", y=2 * y)), flush=True)
    failing = eqxbatch.KernelOperator(
        Tiles(tiles.array, fails=rank == num - 1), **settings
    )
    print("failed", error_of(lambda: solve("failed", failing)), flush=True)

    for place in (0, num - 1):
        # An interrupt while a process multiplies.
        tiles = Tiles(dense, fails=rank == place, error=KeyboardInterrupt)
        failing = eqxbatch.KernelOperator(tiles, **settings)
        message = error_of(lambda: solve(f"interrupted {place}", failing))
        print(f"interrupted{place}", message, flush=True)
    message = error_of(lambda: solve("own", y=y + rank))
    print("own", message, flush=True)
    np.testing.assert_array_equal(solve("again").weights, whole.weights)

    init = lambda key: eqx.nn.MLP(3, 2, 8, 1, key=key)
    average = {"init": init, "key": jax.random.key(0), "num_samples": 2 * num}
    alone = eqxbatch.MonteCarloKernel(**average, get="ntk")(x)
    for axes in ({"sample_axis": "rows"}, {"mesh_axis": "rows", "block_size": 8}):
        shared = eqxbatch.MonteCarloKernel(**average, get="ntk", mesh=mesh, **axes)
        found = shared(x)
        for shard in found.addressable_shards:
            expected = np.asarray(alone)[shard.index]
            np.testing.assert_allclose(shard.data, expected, rtol=1e-4, atol=1e-5)
"""


DIES = """
    tiles = Tiles(dense.astype(np.float32))

    class Dies(Tiles):
        def __getitem__(self, index):
            if rank == num - 1 and self.num == 3:
                os._exit(3)
            return super().__getitem__(index)

    stored = eqxbatch.KernelOperator(Dies(tiles.array), **settings)
    eqxbatch.kernel_solve(stored, y, ridge=0.5, preconditioner_rank=0)
"""


def run(script, num, folder, timeout=200):
    """What some processes print that run a script together, and how they end."""
    port = free_port()
    text = textwrap.dedent(BEGIN) + textwrap.dedent(script)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", text, str(rank), str(num), str(port), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(COMPILE_FAST),
        )
        for rank in range(num)
    ]
    try:
        found = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        (process.returncode, dict(line.split(" ", 1) for line in out.splitlines()), err)
        for process, (out, err) in zip(processes, found, strict=True)
    ]


@pytest.mark.versions
@pytest.mark.parametrize("num", (2, pytest.param(4, marks=pytest.mark.matrix)))
def test_several_processes(num, tmp_path):
    found = run(TOGETHER, num, tmp_path)
    for code, _, err in found:
        assert code == 0, err
    lines = [out for _, out, _ in found]
    # Each reads its share of the tiles on and above the diagonal, once.
    tiles = [int(out["tiles"]) for out in lines]
    assert sum(tiles) == 6 * 7 // 2
    assert max(tiles) - min(tiles) <= 1
    first, *others = lines
    assert first["stopped"] == "KeyboardInterrupt: "
    assert first["other"].startswith("ValueError: `checkpoint` belongs to another pro")
    assert first["failed"].startswith("RuntimeError: A kernel is computed by")
    for out in others:
        for name in ("stopped", "other"):
            assert out[name].startswith("RuntimeError: The first process has failed")
    assert others[-1]["failed"] == "OSError: no disk"
    assert first["interrupted0"] == "KeyboardInterrupt: no disk"
    assert others[-1][f"interrupted{num - 1}"] == "KeyboardInterrupt: no disk"
    assert others[-1]["own"].startswith("ValueError: `y` must be the same in all")
    assert first["own"].startswith("RuntimeError: A kernel is computed by")
    weights = [np.load(tmp_path / f"weights_{rank}.npy") for rank in range(num)]
    for other in weights[1:]:
        np.testing.assert_array_equal(other, weights[0])


def test_a_process_that_dies(tmp_path):
    """It ends the others, which would wait for it."""
    begin = time.monotonic()
    (code, _, err), (died, _, _) = run(DIES, 2, tmp_path)
    assert died == 3
    assert code not in (0, None)
    assert err
    assert time.monotonic() - begin < 90
