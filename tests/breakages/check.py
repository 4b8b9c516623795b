"""The report of sites."""

from .breakage import Breakage


BREAKAGES = [
    Breakage(
        "all parameters are explained, whichever are selected",
        "explain_sites",
        "are_parameters(model, as_where(where), filter_spec)",
        "are_parameters(model, None, filter_spec)",
        "tests/check/test_explain.py -k selected",
    ),
]
