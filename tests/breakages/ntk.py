"""Kernels of models and their averages."""

from .breakage import Breakage


BREAKAGES = [
    Breakage(
        "all random models have the same dropout",
        "StatefulModel.__call__",
        "jr.fold_in(key, self.index)",
        "key",
        "tests/ntk -k dropout",
    ),
    Breakage(
        "each batch of samples is traced anew",
        "Average.of",
        "jnp.asarray(start, jnp.int32)",
        "start",
        "tests/ntk -k traces",
    ),
    Breakage(
        "a standard error that is resumed is one of n in place of n - 1",
        "_resumed",
        "num * (num - 1.0)",
        "num * (num - 0.0)",
        "tests/ntk -k previous",
    ),
    Breakage(
        "both sides of a kernel are multiplied by the whole metric",
        "Metric.on_sides",
        "(2 * is_first, 2 * (not is_first))",
        "(2, 2)",
        "tests/ntk/test_metric.py -k roles",
    ),
    Breakage(
        "a metric may have negative entries",
        "_root_of_entries",
        "(wide >= 0) & jnp.isfinite(wide)",
        "jnp.isfinite(wide)",
        "tests/wrong_calls -k EmpiricalNTK",
    ),
    Breakage(
        "stored features have the mask of another batch",
        "_features_of_rows",
        "(rows, None)",
        "(rows[::-1], None)",
        "tests/ntk/test_metric.py -k disk",
    ),
]
