"""The pictures on the guide pages: `python -m benchmarks.pictures`.

XLA reports the memory of compiled programs, and eqxbatch computes the Hessian. The
other two pictures are drawings.
"""

import itertools
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.patches import Rectangle

from eqxbatch import filter_hessian, filter_micro_grad
from . import harness
from .first_screen import loss as one_loss
from .micro_grad import KEY, Transformer
from .plots import GREY, OURS, picture, THEIRS, THIRD


DOCS = pathlib.Path(__file__).parent.parent / "docs"
SIZES = (32, 128)


def temporaries(num: int, size: int | None) -> float:
    """The memory of a gradient of `num` sequences in MB, at once or in microbatches."""
    model = Transformer(KEY, embeds=True)
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def grad(arrays, tokens, labels):
        model = eqx.combine(arrays, static)
        if size is not None:
            return filter_micro_grad(one_loss, microbatch_size=size)(
                model, tokens, labels
            )
        mean = lambda model: jnp.mean(
            jax.vmap(one_loss, (None, 0, 0))(model, tokens, labels)
        )
        return eqx.filter_grad(mean)(model)

    args = (arrays, jnp.zeros((num, 64), int), jnp.zeros(num, int))
    return harness.temporaries(jax.jit(grad).lower(*args)) / 1e6


def memory() -> None:
    batches = 2 ** np.arange(5, 12)
    with picture(DOCS / "memory.svg", 6, 3.4) as figure:
        axis = figure.subplots()
        for size, colour, marker in (
            (None, THEIRS, "^"),
            *zip(SIZES, (OURS, THIRD), "os", strict=True),
        ):
            over = [int(n) for n in batches if size is None or n >= size]
            label = "whole batch" if size is None else f"microbatches of {size}"
            found = [temporaries(n, size) for n in over]
            print(label, dict(zip(over, found, strict=True)), flush=True)
            axis.loglog(over, found, color=colour, marker=marker, label=label)
        axis.set_xticks(batches, labels=[f"{n:,}" for n in batches])
        axis.set_yticks(
            [10, 100, 1_000, 10_000], labels=["10", "100", "1,000", "10,000"]
        )
        axis.minorticks_off()
        axis.set_xlabel("batch size")
        axis.set_ylabel("peak temporary memory, MB")
        axis.legend()


def draw_cells(axis, rows: int, columns: int, colour_of) -> None:
    for i in range(rows):
        for j in range(columns):
            colour, alpha = colour_of(i, j)
            cell = Rectangle((j, i), 1, 1, fc=colour, alpha=alpha, ec="none")
            axis.add_patch(cell)
            axis.add_patch(Rectangle((j, i), 1, 1, fc="none", ec=GREY, lw=0.8))
    axis.set_aspect("equal")
    axis.axis("off")


def kernel_blocks() -> None:
    num, row, column = 6, 1, 3

    def colour_of(i, j):
        if (i, j) == (row, column):
            return OURS, 1.0
        return (OURS, 0.35) if i <= j else (THEIRS, 0.25)

    with picture(DOCS / "kernel_blocks.svg", 6, 3.6) as figure:
        axis = figure.subplots()
        draw_cells(axis, num, num, colour_of)
        for place, width, height in (
            ((-0.9, row), 0.5, 1),
            ((column, -0.9), 1, 0.5),
        ):
            axis.add_patch(Rectangle(place, width, height, fc=OURS, ec="none"))
        axis.add_patch(Rectangle((-0.9, 0), 0.5, num, fc="none", ec=GREY))
        axis.add_patch(Rectangle((0, -0.9), num, 0.5, fc="none", ec=GREY))
        axis.text(-1.1, num / 2, "x1", ha="right", va="center")
        axis.text(num / 2, -1.1, "x2 = x1", ha="center", va="bottom")
        for y, colour, alpha, text in (
            (1.0, OURS, 1.0, "the block at work: kernel_fn\n(rows of x1, rows of x2)"),
            (2.7, OURS, 0.35, "computed"),
            (4.2, THEIRS, 0.25, "by symmetry: mirrored"),
        ):
            axis.add_patch(Rectangle((6.8, y), 0.6, 0.6, fc=colour, alpha=alpha))
            axis.text(7.7, y + 0.3, text, va="center")
        axis.set_xlim(-1.8, 13)
        axis.set_ylim(num + 0.1, -1.7)


def hessian_blocks() -> None:
    model = eqx.nn.MLP(4, "scalar", 5, 2, jnp.tanh, key=KEY)
    model = jax.tree.map(lambda x: 2 * x if eqx.is_array(x) else x, model)
    xs = jr.normal(KEY, (200, 4))
    matrix, _ = filter_hessian(
        lambda model, x, y: (model(x) - y) ** 2, in_axes=0, flat=True
    )(model, xs, jnp.sin(xs[:, 0]))
    found = np.abs(np.asarray(matrix))
    sizes = [layer.weight.size + layer.bias.size for layer in model.layers]
    with picture(DOCS / "hessian_blocks.svg", 8, 2.9) as figure:
        begins = np.concatenate([[0], np.cumsum(sizes)])
        is_block = np.zeros(found.shape, bool)
        for begin, end in itertools.pairwise(begins):
            is_block[begin:end, begin:end] = True
        parts = (
            ("filter_hessian", np.ones(found.shape, bool)),
            ("filter_hessian_blocks,\none for each layer", is_block),
            ("filter_hessian_diagonal", np.eye(len(found), dtype=bool)),
        )
        norm = LogNorm(found.max() / 1e3, found.max(), clip=True)
        for axis, (title, shown) in zip(figure.subplots(1, 3), parts, strict=True):
            image = np.ma.masked_array(found, ~shown)
            axis.imshow(image, norm=norm, cmap=plt.get_cmap("cividis"))
            axis.set_title(title, fontsize=10)
            axis.set_xticks(begins[1:-1] - 0.5, labels=[])
            axis.set_yticks(begins[1:-1] - 0.5, labels=[])
            axis.spines[:].set_visible(True)
            axis.tick_params(length=4)
        middles = (begins[:-1] + begins[1:]) / 2
        first = figure.axes[0]
        first.set_yticks(middles - 0.5, labels=[f"layer {i}" for i in range(3)])
        first.tick_params(axis="y", length=0)


def grid() -> None:
    rows, columns = 5, 8
    with picture(DOCS / "grid.svg", 7, 3.0) as figure:
        axis = figure.subplots()
        draw_cells(
            axis, rows, columns, lambda i, j: (OURS, 0.8 if 1 <= i < 3 else 0.15)
        )
        for i in range(rows):
            axis.text(-0.3, i + 0.5, f"x[{i}]", ha="right", va="center")
            axis.add_patch(Rectangle((10.2, i), 1, 1, fc=THEIRS, alpha=0.6, ec=GREY))
        for j in range(columns):
            axis.text(j + 0.5, -0.25, f"y[{j}]", ha="center")
        axis.annotate(
            "",
            (10, rows / 2),
            (8.2, rows / 2),
            arrowprops={"arrowstyle": "->", "color": GREY},
        )
        axis.text(10.7, -0.25, '{"j": Mean()}', ha="center")
        axis.text(
            *(4, 2, "a block: f(x[i], y[j])"),
            ha="center",
            va="center",
            color="black",
            bbox={"facecolor": OURS, "edgecolor": "none"},
        )
        axis.text(4, rows + 0.55, "grid axis j", ha="center")
        axis.text(-1.7, rows / 2, "grid axis i", rotation=90, va="center", ha="right")
        axis.set_xlim(-2.6, 12.6)
        axis.set_ylim(rows + 0.8, -0.9)


if __name__ == "__main__":
    kernel_blocks()
    grid()
    hessian_blocks()
    memory()
