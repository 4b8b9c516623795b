"""Gradients of each example."""

from .breakage import Breakage


BREAKAGES = [
    Breakage(
        "gradients are formed where one backward pass is right",
        "AbstractAnyMicroGradient.apply",
        "blocks = dataclasses.replace(blocks, overlaps=False)",
        "pass",
        "tests/gradients/test_backward_passes.py -k one_backward_pass",
    ),
    Breakage(
        "a power of two that inputs are divided by is lost",
        "_balanced",
        "weights * power.astype(weights.dtype)",
        "weights",
        "tests/gradients -k '_float16 or range'",
    ),
    Breakage(
        "the last group decides which examples are finite",
        "Groups._clipped",
        "functools.reduce(jnp.logical_and, finite)",
        "finite[-1]",
        "tests/gradients -k 'finite or groups or nan_safe'",
    ),
    Breakage(
        "examples of two microbatches of a coupled loss count once",
        "AbstractAnyMicroGradient.overlaps",
        "self.batched or self.axis_name is not None",
        "self.batched",
        "tests/gradients/test_coupled_examples.py",
    ),
]
