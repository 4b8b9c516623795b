"""Checks which settings of a gradient can be combined, and names remedies."""

from collections.abc import Callable
from typing import get_args

from jaxtyping import PyTree

from .._base.trees import described, shown
from .._batch.moments import Mean, RunningMean, Sum
from .._sites.cost import Method


TOTALS = (Sum, Mean, RunningMean)


# The default for a loss of one example. `is` tells it from a mean that is given.
DEFAULT = Mean()


_ACCUMULATORS = (
    "`accumulator=Mean()` if it is a mean over the examples, or `accumulator=Sum()` if "
    "it is a sum"
)


IF_WHOLE = (
    f"If it is the loss of a whole batch, say `batched=True` and {_ACCUMULATORS}; or "
    "give the loss of one example."
)


IF_ONE = "If it is the loss of one example, leave out `batched=True`."


NO_ACCUMULATOR = (
    "`batched=True` needs an `accumulator`, because eqxbatch cannot tell what the loss "
    f"of a whole microbatch is: {_ACCUMULATORS}. The wrong one of them makes the "
    "result depend on the microbatch size."
)


def check_settings(
    *,
    accumulator: PyTree,
    batched: bool,
    functions: dict[str, Callable | None],
    moments: bool,
    clips: bool,
    method: Method,
) -> None:
    """Raises for settings that are invalid, alone or together.

    `functions` are the functions of a per-example gradient.
    """
    if method not in get_args(Method):
        raise ValueError(f"`method` must be one of {get_args(Method)}; got {method!r}.")
    given = {name: fun for name, fun in functions.items() if fun is not None}
    for name, fun in given.items():
        if not callable(fun):
            raise TypeError(
                f"`{name}` must be a function of the gradient of one example, or "
                f"None; got {described(fun)}."
            )
    of_gradients = [*given, *["moments"] * moments]
    of_examples = [*of_gradients, *["clip_norm, nan_safe or return_norms"] * clips]
    if method == "sites" and of_gradients:
        raise ValueError(
            "`method='sites'` does not materialise per-example gradients, but "
            f"`{of_gradients[0]}` needs them. Use `method='auto'`."
        )
    if batched and of_examples:
        raise ValueError(
            f"`{of_examples[0]}` is about single examples, but with "
            "`batched=True` the loss is that of a whole microbatch. Give the loss "
            "of one example, without `batched`."
        )
    if functions["transform"] is None and not isinstance(accumulator, TOTALS):
        raise TypeError(
            "`accumulator` must be a Sum, a Mean or a RunningMean, as it is for "
            f"gradients; got {shown(accumulator)}. With a `transform`, it "
            "can be any accumulator, or a PyTree prefix of them."
        )
    is_weighted = (
        isinstance(accumulator, (Sum, Mean)) and accumulator.weights is not None
    )
    if moments and is_weighted:
        raise ValueError(
            "`moments` are those of examples that count the same, but the accumulator "
            "has weights. Compute them without weights."
        )
