"""The examples in the docstrings."""

import doctest
import importlib
import pkgutil

import jax
import pytest

import eqxbatch


pytestmark = [pytest.mark.quick, pytest.mark.docs]


MODULES = [info.name for info in pkgutil.walk_packages(eqxbatch.__path__, "eqxbatch.")]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    # Written for users, whose configuration is the default one.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    num = sum(
        len(test.examples)
        for name in MODULES
        for test in finder.find(importlib.import_module(name))
    )
    assert num >= 15
