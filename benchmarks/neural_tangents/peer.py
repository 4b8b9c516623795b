"""Times `neural_tangents` on request; each line of standard input is a JSON object.

It runs in its own environment; see `environment.py`. `{"prepare": job}` compiles a job
for all implementations and answers with their names and FLOPs; `{"run": name}`
runs one of them once and answers with the seconds. `{"monte_carlo": job}` is the same
as `prepare` for averages over random models, and `{"traces": name}` answers with the
mean diagonals of such averages over 1, 2, ... samples.
"""

import json
import sys
import time

import jax
import jax.numpy as jnp
import models
import neural_tangents as nt
from jax._src.interpreters import ad as private_ad
from jax.interpreters import ad
from neural_tangents import stax


# Structured derivatives use names that the public module of JAX 0.5 no longer has.
for name in dir(private_ad):
    if not hasattr(ad, name):
        setattr(ad, name, getattr(private_ad, name))
ad.config = jax.config

IMPLEMENTATIONS = {
    "Jacobian contraction": 1,
    "NTK-vector products": 2,
    "structured derivatives": 3,
}


def build(job):
    """The model, its parameters and the inputs of a job."""
    key = jax.random.PRNGKey(0)
    n, kind = job["n"], job["model"]
    if job.get("block") is not None:
        # `nt.batch` takes only what divides.
        n = -(-n // job["block"]) * job["block"]
    if kind == "dense":
        params = models.dense_init(key, job["sizes"])
        return models.dense, params, jax.random.normal(key, (n, job["sizes"][0]))
    if kind in ("cnn_gap", "cnn_flat"):
        size = job["size"]
        params = models.cnn_init(key, job["outputs"], size, kind == "cnn_flat")
        x = jax.random.normal(key, (n, size, size, 3))
        return getattr(models, kind), params, x
    if kind == "transformer":
        params = models.transformer_init(key, job["width"], job["outputs"])
        x = jax.random.normal(key, (n, job["length"], job["width"]))
        return models.transformer, params, x
    assert kind == "embedding"
    params = models.embedding_init(key, job["words"], job["width"], job["outputs"])
    x = jax.random.randint(key, (n, job["length"]), 0, job["words"])
    return models.embedding, params, x


def prepare(job, compiled):
    apply, params, x = build(job)
    compiled.clear()
    found = {}
    for name, implementation in IMPLEMENTATIONS.items():
        if name in job.get("without", ()):
            continue
        kernel_fn = nt.empirical_ntk_fn(
            apply,
            trace_axes=(-1,) if job["traced"] else (),
            vmap_axes=0,
            implementation=implementation,
        )
        if job.get("block") is not None:
            # As intended: each block is compiled, in a Python loop.
            kernel_fn = nt.batch(
                kernel_fn, batch_size=job["block"], store_on_device=True
            )
            program, flops = (lambda f=kernel_fn: f(x, None, params)), None
        else:
            # `x` and `p` are arguments, so nothing is computed at compile time.
            jitted = jax.jit(lambda x, p, f=kernel_fn: f(x, None, p)).lower(x, params)
            executable = jitted.compile()
            analysis = executable.cost_analysis()
            analysis = analysis[0] if isinstance(analysis, list) else analysis
            flops = analysis["flops"]
            program = lambda e=executable: e(x, params)
        jax.block_until_ready(program())
        compiled[name] = program
        found[name] = flops
    return found


def random_model(job):
    """The functions that draw and apply parameters, in the NTK parameterisation."""
    std = {"W_std": job["weight_std"], "b_std": job["bias_std"]}
    if job["model"] == "dense":
        layers = [
            part
            for n in job["sizes"][1:-1]
            for part in (stax.Dense(n, **std), stax.Relu())
        ]
        outputs = job["sizes"][-1]
    else:
        conv = lambda: stax.Conv(32, (3, 3), padding="SAME", **std)
        layers = [part for _ in range(3) for part in (conv(), stax.Relu())]
        layers.append(stax.GlobalAvgPool())
        outputs = job["outputs"]
    init, apply, _ = stax.serial(*layers, stax.Dense(outputs, **std))
    return init, apply


def average(job, implementation, num):
    """The kernel function as users call it; it needs no additional `jax.jit`."""
    init, apply = random_model(job)
    kernel_fn = nt.monte_carlo_kernel_fn(
        init,
        apply,
        jax.random.PRNGKey(1),
        num,
        trace_axes=(-1,),
        vmap_axes=0,
        implementation=implementation,
    )
    x = jnp.asarray(job["x"], jnp.float32)
    return lambda: kernel_fn(x, None, ("nngp", "ntk"))


def prepare_average(job, compiled):
    compiled.clear()
    for name, implementation in IMPLEMENTATIONS.items():
        if name not in job["without"]:
            compiled[name] = average(job, implementation, job["num"])
            jax.block_until_ready(compiled[name]())
    return list(compiled)


def mean_diagonals(job, name):
    running = average(job, IMPLEMENTATIONS[name], range(1, job["num"] + 1))()
    mean = lambda kernel: float(jnp.mean(jnp.diagonal(kernel)))
    return [[mean(kernel) for kernel in kernels] for kernels in running]


def main():
    compiled = {}
    averaged = None
    for line in sys.stdin:
        message = json.loads(line)
        if "prepare" in message:
            answer = prepare(message["prepare"], compiled)
        elif "monte_carlo" in message:
            averaged = message["monte_carlo"]
            answer = prepare_average(averaged, compiled)
        elif "traces" in message:
            answer = mean_diagonals(averaged, message["traces"])
        elif "analytic" in message:
            job = message["analytic"]
            x = jax.random.normal(jax.random.PRNGKey(0), (job["n"], 64))
            kernel_fn = lambda x1, x2, depth=job["depth"]: models.arc_cosine(
                x1, x2, depth
            )
            batched = nt.batch(kernel_fn, batch_size=job["block"], store_on_device=True)
            compiled["analytic"] = lambda f=batched, x=x: f(x, None)
            jax.block_until_ready(compiled["analytic"]())
            answer = None
        elif "plain" in message:
            apply, params, x = build(message["plain"])
            total = lambda params, x, apply=apply: jnp.sum(apply(params, x))
            gradient = jax.jit(jax.grad(total)).lower(params, x).compile()
            compiled["plain"] = lambda f=gradient, a=(params, x): f(*a)
            jax.block_until_ready(compiled["plain"]())
            answer = None
        else:
            start = time.perf_counter()
            jax.block_until_ready(compiled[message["run"]]())
            answer = time.perf_counter() - start
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
