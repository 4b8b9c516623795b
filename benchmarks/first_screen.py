"""The picture in the README and on the home page: a step with and without eqxbatch.

A training step is the loss, gradient and update of `optax.adam`, for a transformer. XLA
reports the peak temporary memory of the compiled step.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax

from eqxbatch import filter_micro_value_and_grad
from . import harness, plots, work
from .harness import Bar, bars_of, Case, compile_ways, measure, OURS, Row
from .limit import num_bytes, Work
from .micro_grad import CLIP, KEY, Transformer


NAME = "first_screen"
ROOT = pathlib.Path(__file__).parent.parent
WHOLE, EACH = "whole batch", "jax.vmap(jax.grad)"
OPTIMISER = optax.adam(1e-3)


def loss(model, tokens, label):
    return model(tokens, label)


def steps(static: Any, size: int, *, clips: bool) -> dict[str, Callable]:
    """Two ways to compute a training step, `step(arrays, state, tokens, labels)`."""

    def step(value_and_grad, arrays, state, tokens, labels):
        value, grads = value_and_grad(eqx.combine(arrays, static), tokens, labels)
        updates, state = OPTIMISER.update(grads, state)
        return eqx.apply_updates(arrays, updates), state, value

    def mean(model, tokens, labels):
        return jnp.mean(jax.vmap(loss, (None, 0, 0))(model, tokens, labels))

    def clipped(model, tokens, labels):
        one = eqx.filter_value_and_grad(loss)
        each = eqx.filter_vmap(one, in_axes=(None, 0, 0))
        values, grads = each(model, tokens, labels)
        leaves, structure = jax.tree.flatten(grads)
        sums, _ = optax.per_example_global_norm_clip(leaves, CLIP)
        grads = jax.tree.unflatten(structure, [x / len(labels) for x in sums])
        return jnp.mean(values), grads

    ours = filter_micro_value_and_grad(
        loss, microbatch_size=size, clip_norm=CLIP if clips else None
    )
    theirs = clipped if clips else eqx.filter_value_and_grad(mean)
    return {
        OURS: functools.partial(step, ours),
        EACH if clips else WHOLE: functools.partial(step, theirs),
    }


def cases(quick: bool) -> list[Case]:
    num, size = (32, 8) if quick else (256, 16)
    model = Transformer(KEY, embeds=True)
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    tokens = jr.randint(KEY, (num, 64), 0, 10_000)
    args = (arrays, OPTIMISER.init(arrays), tokens, jr.randint(KEY, (num,), 0, 10))
    products = work.products_of(loss, model, *args[2:])
    # The model and the state of Adam are also results.
    moved = num_bytes(args, args[:2])
    job = f"{num} sequences of 64 tokens, microbatches of {size}"
    return [
        Case(
            f"step, {name}",
            f"{title}: {job}",
            steps(static, size, clips=clips),
            args,
            Work(flops(products, num), moved),
            unbounded=(),
            best_time=1.1,
        )
        for name, title, clips, flops in (
            ("plain", "a training step", False, work.accumulated),
            ("clipped", "the same, each gradient clipped", True, work.clipped),
        )
    ]


def agreement_bars(case: Case, compiled: dict[str, Any]) -> list[Bar]:
    """Both ways have the same values and updated parameters."""
    ours, theirs = (way(*case.args) for way in compiled.values())
    off = jax.tree.map(jnp.subtract, ours[0], theirs[0])
    error = float(jnp.sqrt(sum(jnp.mean(x**2) for x in jax.tree.leaves(off))))
    value = float(jnp.abs(ours[2] - theirs[2]) / theirs[2])
    return [
        # Adam's first step changes each entry by about 1e-3, up or down.
        Bar(f"{case.name}: root mean square of updates that differ", error, 1e-4),
        Bar(f"{case.name}: relative difference of values", value, 1e-5),
    ]


def plot(measured: list[tuple[Case, list[Row]]], path: pathlib.Path) -> None:
    names, memory, seconds, colours = [], [], [], []
    for (_, rows), what in zip(measured, ("mean gradient", "clipped"), strict=True):
        for row in sorted(rows, key=lambda row: row.way == OURS):
            names.append(f"{what}\n{row.way}")
            memory.append(row.temporaries / 1e6)
            seconds.append(row.seconds)
            colours.append(plots.OURS if row.way == OURS else plots.THEIRS)
    with plots.picture(path, 8, 2.9) as figure:
        axes = figure.subplots(1, 2, sharey=True)
        for axis, values, title, form in zip(
            axes,
            (memory, seconds),
            ("peak temporary memory, MB", "time of a training step, s"),
            ("{:,.0f}", "{:.2f}"),
            strict=True,
        ):
            bars = axis.barh(names, values, color=colours, height=0.7)
            axis.bar_label(bars, [form.format(x) for x in values], padding=4)
            axis.set_title(title, fontsize=10)
            axis.set_xlim(0, 1.2 * max(values))
            axis.set_xticks([])
            axis.spines["bottom"].set_visible(False)
            axis.tick_params(left=False)
        axes[0].invert_yaxis()


def sentence(measured: list[tuple[Case, list[Row]]], machine: dict[str, Any]) -> str:
    """The sentence below the picture."""
    plain, clipped = (
        next(row for row in rows if row.way != OURS) for _, rows in measured
    )
    where = f"{machine['cores']} cores of an {machine['processor']}"
    return (
        f"On {where}, a training step of a small transformer needs "
        f"{plain.memory_ratio:.0f} times less temporary memory in microbatches. "
        f"With per-example clipping, it needs {clipped.memory_ratio:.0f} times less, "
        f"and is {clipped.time_ratio:.1f} times as fast."
    )


def run(quick: bool) -> tuple[dict[str, Any], str, list[Bar]]:
    """The figures as JSON, the table for the docs, and the bars."""
    bars, measured = [], []
    for case in cases(quick):
        compiled = compile_ways(case)
        rows = measure(case, 2 if quick else 9, compiled)
        measured.append((case, rows))
        bars += [*agreement_bars(case, compiled), *bars_of(case, rows)]
    folder = ROOT / "build" / "benchmarks" if quick else ROOT / "docs"
    if harness.judges_times():
        plot(measured, folder / f"{NAME}.svg")
    figures, text = harness.results(measured, bars)
    figures["sentence"] = sentence(measured, figures["machine"])
    return figures, text, bars
