"The descent: one scan, what it stores, and what it may leave out."

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import block_of, tokens
from flax import nnx

from et_nbdev.dynamics import descend
from et_nbdev.testing import assert_close

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("compile_quickly")]


@pytest.mark.parametrize(
    "lead, steps, step_size, shape, options",
    [
        ((2,), 3, 0.3, (2, 4, 4), dict(beta=nnx.Param(0.4))),
        ((2, 2), 4, 0.02, (4, 4), dict(memory="softmax")),
    ],
    ids=["learned", "shared mask"],
)
def test_scan_rematerialized_and_unrolled_are_the_same_in_values_and_gradients(
    x64, lead, steps, step_size, shape, options
):
    "As the loop that they stand for: test_compiled.py, nbs/07_dynamics.ipynb."
    rng = np.random.default_rng(steps)
    graphdef, state = nnx.split(block_of(**options))
    x, v = tokens(*lead, 4, 6), rng.normal(size=(*lead, 4, 6))
    w = rng.normal(size=(2, steps + 1, *lead))
    mask = rng.random(shape) < 0.6

    def run(state, x, **variant):
        "A loss of the last state and of every energy on the way, and all of them."
        block, given = nnx.merge(graphdef, state), dict(states=True, mask=mask)
        last, path = descend(block, x, steps, step_size, **given, **variant)
        parts = [jnp.vdot(v, last), *map(jnp.vdot, w, path.energies.values())]
        return sum(parts), (last, path)

    both = lambda **variant: jax.jit(
        jax.value_and_grad(partial(run, **variant), (0, 1), has_aux=True)
    )(state, x)
    expected = both()
    assert all(np.any(leaf) for leaf in jax.tree.leaves(expected[1]))
    for variant in (dict(unroll=True), dict(remat=True, unroll=2)):
        close = partial(assert_close, rtol=1e-12, atol=1e-12)
        jax.tree.map(close, both(**variant), expected)


def test_a_trajectory_has_both_ends_and_the_papers_defaults(x64):
    block, x = block_of(), tokens(2, 2, 4, 6)
    last, path = descend(block, x, 0, states=True)
    total = path.energies["attention"] + path.energies["memory"]
    np.testing.assert_array_equal(path.energies.total, total)
    np.testing.assert_array_equal([*path.states, last], [x, x])
    assert descend(block, x, 0)[1].states is None
    assert_close(descend(block, x)[0], descend(block, x, 12, 0.1)[0], rtol=1e-12)
    assert_close(block(x), block.norm(descend(block, x)[0]))


def test_nothing_is_stored_or_computed_that_nobody_asked_for(x64):
    block, x = block_of(K=64), tokens(2, 4, 6)
    lowered = lambda f: jax.jit(f).lower(x)
    logs = lambda f: lowered(f).compile().as_text().count(" log(")
    # the logarithm stands in Eq. (3) and in no update
    assert logs(lambda x: descend(block, x, 3)[1].energies.total) > 0
    assert logs(lambda x: descend(block, x, 3)[0]) == 0

    def stored(**options):
        forward = lambda x: descend(block, x, 10, **options)[0]
        saved = jax.eval_shape(lambda x: jax.vjp(forward, x)[1], x)
        return sum(leaf.size for leaf in jax.tree.leaves(saved))

    assert stored(remat=True) < stored() / 4
    end = lambda **options: lambda x: descend(block, x, 10, **options)[0]
    loops = lambda **o: lowered(end(**o)).as_text().count("stablehlo.while")
    assert loops() == 1 and loops(unroll=True) == 0
