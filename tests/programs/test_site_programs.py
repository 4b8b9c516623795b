"""Random programs against dense derivatives; `site_programs` runs for longer."""

import jax
import pytest

from ..sites.adapter import scaled_products_of_factors
from .program_draw import draw
from .site_programs import examine, settings


# JAX 0.7 warns of its own casts in derivatives of complex programs.
pytestmark = [
    pytest.mark.versions,
    pytest.mark.filterwarnings("ignore:Casting complex values to real"),
]

# Together, the programs below have nearly all uses, in most of the contractions that
# these allow. These are small ones.
SEEDS = (
    *(290, 208, 140, 246, 243, 266, 244, 240, 74),
    *(152, 89, 126, 273, 62, 86, 156, 182),
)
# Programs of one use: dilated and grouped convolutions, and rows that are dropped.
OF_ONE_USE = (
    (200494, ("convolution",)),
    (44, ("rows_taken", "rows_by_lax_gather")),
    (9, ("attention",)),
    (14, ("nested",)),
)
# Programs that compute something of their parameters alone: penalties, masks, stacks,
# what is frozen.
SHARED = (
    "penalised",
    "penalised_in_a_scan",
    "layers_of_a_stack",
    "among_data",
    "frozen_branch",
    "linear",
)
OF_PARAMETERS_ALONE = (1006, 1009, 1019, 1035, 1039)
# Programs with branches, and derivatives that are not those of the values.
OF_RULES = (
    "custom_product",
    "custom_product_and_another",
    "branched",
    "branched_by_step",
    "branch_of_a_function",
)
OF_BIASES = ("custom_product_and_bias",)
OF_OWN_DERIVATIVES = (
    *((seed, OF_RULES) for seed in (5004, 5006, 5007)),
    (37, ("branched",)),
    (25, ("branch_of_a_function",)),
    (5208, OF_BIASES),
)
# Products with the matrices of groups.
OF_EXPERTS = (
    *("experts", "experts_up_and_down", "experts_of_one_matrix"),
    *("experts_in_a_loop", "experts_of_parameters", "experts_of_a_branch"),
)
WITH_EXPERTS = (3001, 3004, 4002)
# Uses whose views have no inner products, so that nobody knows whether terms cancel.
OF_OTHER_VIEWS = (800014, 700057)
# The one of these that a program is compared by, besides all contractions of gradients.
IN_TURN = ("hessian_by_sites", "kernels_by_factors", "gauss_newton_by_sites")


def compare(program, *turn):
    result = examine(program, ["norms_and_sums", *turn])
    report = "\n".join(map(str, [program, *result.findings]))
    assert not result.findings, report
    assert result.skipped is None
    assert result.num_compared


@pytest.mark.matrix
@pytest.mark.parametrize("seed", SEEDS)
def test_random_program(seed):
    with settings():
        program = draw(seed)
    compare(program, IN_TURN[SEEDS.index(seed) % len(IN_TURN)])


@pytest.mark.matrix
@pytest.mark.parametrize(("seed", "uses"), OF_ONE_USE)
def test_random_program_of_one_use(seed, uses):
    with settings():
        program = draw(seed, uses)
    compare(program)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", OF_PARAMETERS_ALONE)
def test_random_program_of_parameters_alone(seed):
    with settings():
        program = draw(seed, SHARED)
    compare(program, IN_TURN[seed % len(IN_TURN)])


@pytest.mark.matrix
@pytest.mark.parametrize(("seed", "uses"), OF_OWN_DERIVATIVES)
def test_random_program_of_branches_and_rules(seed, uses):
    with settings():
        program = draw(seed, uses)
    compare(program, IN_TURN[seed % len(IN_TURN)])


@pytest.mark.matrix
@pytest.mark.parametrize("seed", WITH_EXPERTS)
def test_random_program_of_experts(seed):
    with settings():
        program = draw(seed, OF_EXPERTS)
    assert {*OF_EXPERTS} & {*program.blocks}
    compare(program, IN_TURN[WITH_EXPERTS.index(seed)])


@pytest.mark.matrix
@pytest.mark.parametrize("seed", OF_OTHER_VIEWS)
def test_random_program_of_views_without_inner_products(seed):
    with settings():
        program = draw(seed)
    compare(program, "hessian_by_both")


def test_a_program_follows_from_its_seed():
    with settings():
        texts = {str(draw(7)) for _ in range(2)}
        assert len(texts) == 1
        assert texts != {str(draw(8))}


@pytest.mark.matrix
def test_the_search_finds_what_is_broken():
    with settings():
        program = draw(7, ("linear",))
    jax.clear_caches()
    with scaled_products_of_factors(1.5):
        result = examine(program, ["norms_and_sums"])
    assert {finding.check for finding in result.findings} == {"norms_and_sums"}
