"""How Monte-Carlo kernels converge: `python -m benchmarks.convergence`.

NNGP and NTK of random networks with two hidden layers are compared with those of
infinitely wide ones, which are known in closed form for ReLU (Cho and Saul, 2009) and
erf (Williams, 1997). The error falls with the number of samples until a bias remains,
which falls with the width. Writes a table and a plot for the docs; `--quick` writes
those of a smaller run to `build/`.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from eqxbatch import MonteCarloKernel, ntk_parameterise
from . import harness
from .harness import Bar
from .limit import check, NoLimit


HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
KEY = jr.key(0)
HIDDEN, OUTPUTS = 2, 10
BIAS_STD = 0.1
KINDS = ("NNGP", "NTK")
NO_LIMIT = NoLimit("errors take no time")
# The tolerance of slopes, which are fitted to few noisy points.
OFF = 0.15


def relu_means(k11: Any, k12: Any, k22: Any) -> tuple[Any, Any]:
    """E[relu(u) relu(v)] and E[relu'(u) relu'(v)] for normal u and v: arc-cosines."""
    scale = np.sqrt(k11 * k22)
    cosine = np.clip(k12 / scale, -1, 1)
    angle = np.arccos(cosine)
    slope = (np.pi - angle) / (2 * np.pi)
    return scale * (np.sqrt(1 - cosine**2) / (2 * np.pi) + slope * cosine), slope


def erf_means(k11: Any, k12: Any, k22: Any) -> tuple[Any, Any]:
    """The same for erf: arc-sines."""
    product = (1 + 2 * k11) * (1 + 2 * k22)
    value = 2 / np.pi * np.arcsin(2 * k12 / np.sqrt(product))
    return value, 4 / np.pi / np.sqrt(product - 4 * k12**2)


@dataclasses.dataclass(frozen=True)
class Network:
    """Random networks and their limit of infinite width.

    - `means`: E[f(u) f(v)] and E[f'(u) f'(v)] for normal `u` and `v` with a covariance.
    - `weight_std`: large for erf, so that it is far from linear; otherwise the bias
        would be too small to see.
    """

    name: str
    activation: Callable
    means: Callable
    weight_std: float

    def init(self, x: np.ndarray, width: int) -> Callable:
        def init(key):
            mlp = eqx.nn.MLP(
                x.shape[1], OUTPUTS, width, HIDDEN, self.activation, key=key
            )
            return ntk_parameterise(
                mlp, weight_std=self.weight_std, bias_std=BIAS_STD, key=key
            )

        return init

    def limits(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """NNGP and NTK of an infinitely wide network, in float64."""
        x = np.asarray(x, np.float64)
        variance = self.weight_std**2
        nngp = variance * x @ x.T / x.shape[1] + BIAS_STD**2
        ntk = nngp
        for _ in range(HIDDEN):
            own = np.diagonal(nngp)
            value, slope = self.means(own[:, None], nngp, own[None, :])
            nngp = variance * value + BIAS_STD**2
            ntk = nngp + variance * ntk * slope
        return nngp, ntk


NETWORKS = (
    Network("ReLU", jax.nn.relu, relu_means, 2**0.5),
    Network("erf", jax.lax.erf, erf_means, 3.0),
)


def half_circle(num: int) -> np.ndarray:
    """Inputs of mean square 1 on a half circle."""
    angles = np.linspace(0, np.pi, num)
    points = 2**0.5 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return points.astype(np.float32)


def norm(x: Any) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64)))


def by_samples(
    network: Network, x: np.ndarray, counts: tuple[int, ...], width: int, repeats: int
) -> dict[str, Any]:
    """Relative errors, and relative standard errors, for several numbers of samples.

    They are root mean squares over runs with different keys.
    """
    limits, init = network.limits(x), network.init(x, width)
    errors = np.zeros((len(counts), len(KINDS)))
    expected = np.zeros_like(errors)
    for repeat in range(repeats):
        kernel = MonteCarloKernel(
            init,
            key=jr.fold_in(KEY, repeat),
            num_samples=counts,
            samples_per_batch=min(counts),
        )
        for i, found in enumerate(kernel.estimate(x)):
            pairs = zip(found.kernel, found.standard_error, limits, strict=True)
            for j, (mean, error, limit) in enumerate(pairs):
                errors[i, j] += (norm(mean - limit) / norm(limit)) ** 2
                expected[i, j] += (norm(error) / norm(limit)) ** 2
    means = [np.sqrt(sums / repeats).T.tolist() for sums in (errors, expected)]
    return {
        "counts": list(counts),
        "repeats": repeats,
        "errors": means[0],
        "standard_errors": means[1],
        "slopes": [slope(counts, own) for own in means[0]],
    }


def by_width(
    network: Network, x: np.ndarray, widths: tuple[int, ...], per_width: int
) -> dict[str, Any]:
    """Relative errors of NTKs for several widths, with enough samples to see the bias.

    With the width, the bias falls faster than the error of one sample. So the number of
    samples is `per_width` times the width.
    """
    _, limit = network.limits(x)
    errors, expected, counts = [], [], []
    for width in widths:
        kernel = MonteCarloKernel(
            network.init(x, width),
            key=KEY,
            num_samples=per_width * width,
            samples_per_batch=min(per_width * width, 2**15 // width),
            get="ntk",
        )
        found = kernel.estimate(x)
        errors.append(norm(found.kernel - limit) / norm(limit))
        expected.append(norm(found.standard_error) / norm(limit))
        counts.append(found.num_samples)
    return {
        "widths": list(widths),
        "counts": counts,
        "errors": errors,
        "standard_errors": expected,
        "slope": slope(widths, errors),
    }


def slope(x: Sequence, y: Sequence) -> float:
    """The exponent of the power of `x` that fits `y`."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def plot(found: dict[str, dict[str, Any]], path: pathlib.Path) -> None:
    matplotlib.use("agg")
    # Equal figures give an identical file.
    matplotlib.rcParams["svg.hashsalt"] = path.stem
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    colours = {"ReLU": "tab:blue", "erf": "tab:orange"}
    for name, parts in found.items():
        samples = parts["samples"]
        for kind, errors, line in zip(KINDS, samples["errors"], "o^", strict=True):
            style = {"marker": line, "color": colours[name], "linestyle": "none"}
            axes[0].loglog(samples["counts"], errors, label=f"{name}, {kind}", **style)
            draw_fit(axes[0], samples["counts"], errors, colours[name])
        widths = parts["widths"]
        style = {"color": colours[name], "linestyle": "none", "capsize": 2}
        axes[1].errorbar(
            widths["widths"],
            widths["errors"],
            yerr=widths["standard_errors"],
            marker="^",
            label=f"{name}, NTK",
            **style,
        )
        draw_fit(axes[1], widths["widths"], widths["errors"], colours[name])
    axes[1].loglog()
    ticks = widths["widths"]
    axes[1].set_xticks(ticks, labels=map(str, ticks))
    axes[1].minorticks_off()
    axes[0].set_xlabel("number of samples")
    axes[1].set_xlabel("width")
    axes[0].set_ylabel("relative error")
    for axis, ticks in zip(axes, ((0.01, 0.1), (0.01, 0.02, 0.05)), strict=True):
        axis.set_yticks(ticks, labels=[percent(tick) for tick in ticks])
        axis.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_fit(axis: Any, x: list, y: list, colour: str) -> None:
    exponent, offset = np.polyfit(np.log(x), np.log(y), 1)
    fitted = np.exp(offset) * np.asarray(x, float) ** exponent
    axis.plot(x, fitted, color=colour, linewidth=0.8, alpha=0.6)


def percent(value: float) -> str:
    return f"{100 * value:.2g} %"


def table(first: str, keys: Sequence, columns: dict[str, dict[str, Any]]) -> list[str]:
    """Errors with their standard errors, and the slope of their logarithms."""
    cells = {
        name: [
            f"{percent(error)} ({percent(expected)})"
            for error, expected in zip(
                column["errors"], column["standard_errors"], strict=True
            )
        ]
        for name, column in columns.items()
    }
    lines = [f"| {first} | {' | '.join(columns)} |", "|---:|" + "---:|" * len(columns)]
    for key, *row in zip(keys, *cells.values(), strict=True):
        lines.append(f"| {key:,} | {' | '.join(row)} |")
    slopes = (f"{column['slope']:.2f}" for column in columns.values())
    return [*lines, f"| slope | {' | '.join(slopes)} |"]


def text(found: dict[str, dict[str, Any]], x: np.ndarray, width: int) -> str:
    stds = " and ".join(
        f"{network.weight_std:.3g} for {network.name}" for network in NETWORKS
    )
    samples = {
        f"{name}, {kind}": {
            "errors": parts["samples"]["errors"][i],
            "standard_errors": parts["samples"]["standard_errors"][i],
            "slope": parts["samples"]["slopes"][i],
        }
        for name, parts in found.items()
        for i, kind in enumerate(KINDS)
    }
    widths = {f"{name}, NTK": parts["widths"] for name, parts in found.items()}
    (parts, *_) = found.values()
    counts = parts["samples"]["counts"]
    most = parts["widths"]["counts"]
    lines = [
        f"Relative errors of networks with {HIDDEN} hidden layers, with the "
        "estimated standard errors in brackets. Both are Frobenius norms, divided by "
        f"the norm of the kernel of infinitely wide networks. There are {len(x)} "
        f"inputs on a half circle; `weight_std` is {stds}, and `bias_std` {BIAS_STD}.",
        "",
        f"Root mean squares of {parts['samples']['repeats']} runs with different keys, "
        f"networks of width {width}:",
        "",
        *table("samples", counts, samples),
        "",
        f"Between {most[0]:,} samples for the narrowest networks and {most[-1]:,} for "
        "the widest, so that most of the error is bias:",
        "",
        *table("width", parts["widths"]["widths"], widths),
    ]
    return "\n".join(lines)


def bars_of(found: dict[str, dict[str, Any]]) -> list[Bar]:
    bars = []
    for name, parts in found.items():
        for kind, exponent in zip(KINDS, parts["samples"]["slopes"], strict=True):
            title = f"{name}, {kind}: slope over samples, off -0.5"
            bars.append(Bar(title, abs(exponent + 0.5), OFF))
        title = f"{name}, NTK: slope over widths, off -1"
        bars.append(Bar(title, abs(parts["widths"]["slope"] + 1), OFF))
    return bars


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence", description=__doc__
    )
    parser.add_argument(
        "--quick", action="store_true", help="small, without bars, not for the docs"
    )
    quick = parser.parse_args().quick
    x = half_circle(5)
    width = 32 if quick else 256
    counts = (10, 20, 40) if quick else (10, 30, 100, 300, 1_000)
    widths = (4, 8) if quick else (4, 8, 16, 32)
    found = {
        network.name: {
            "samples": by_samples(network, x, counts, width, 2 if quick else 12),
            "widths": by_width(network, x, widths, 2**8 if quick else 2**13),
        }
        for network in NETWORKS
    }
    bars = [] if quick else bars_of(found)
    folder = ROOT / "build" / "benchmarks" if quick else HERE / "results"
    shown = text(found, x, width)
    check(shown, NO_LIMIT)
    harness.write(folder, "convergence", found, shown)
    plot(found, (folder if quick else ROOT / "docs") / "convergence.svg")
    print(shown)
    for bar in bars:
        verdict = "ok" if bar.holds else "MISSED"
        print(f"{verdict:15} {bar.value:8.3g} <= {bar.limit:.3g}  {bar.name}")
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
