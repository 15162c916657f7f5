"""The derivative of the place where a descent settles, noise that freezes, and noise
that does not.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import ring
from flax import nnx

from et_nbdev.block import EnergyTransformer
from et_nbdev.dynamics import descend
from et_nbdev.equilibria import Langevin, Noisy, _conjugate_gradients, equilibrium
from et_nbdev.graph.energy import EdgeTransformer
from et_nbdev.solvers import Backtracking, solve
from et_nbdev.stepping import rms, unit
from et_nbdev.testing import assert_close, hessian

pytestmark = pytest.mark.usefixtures("compile_quickly")


def setting(seed=0, kind=EdgeTransformer, **heads):
    "A block, tokens, and what a loss reads of them."
    heads = partial(kind.Attention, **heads)
    options = dict(attention=heads, init_scale=0.5, param_dtype=jnp.float64)
    block = kind(6, 2, 3, 8, **options, rngs=nnx.Rngs(seed))
    block.norm.delta[...] = jax.random.normal(jax.random.key(5), (6,))
    x, r = (jax.random.normal(jax.random.key(k), (2, 4, 6)) for k in (seed, 9))
    return block, x, r


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def slope(block, end, r):
    "The derivative by all weights of r·g at the place where `end` leads."
    graphdef, state = nnx.split(block)

    def loss(state):
        block = nnx.merge(graphdef, state)
        return jnp.sum(r * block.norm(end(block)))

    return flat(jax.jit(jax.grad(loss))(state))


def test_its_value_is_where_the_solver_ends_up_to_length(x64):
    block, x, _ = setting()
    options = dict(evaluations=300, tolerance=1e-6)
    end = solve(block, x, Backtracking(), **options)
    found, how = equilibrium(block, x, Backtracking(), **options)
    assert_close(block.norm(found), block.norm(end.x), rtol=1e-4)
    for name in ("settled", "x", "evaluations"):
        np.testing.assert_array_equal(getattr(how, name), getattr(end, name))
    assert_close(rms(found, -1), np.ones((2, 4)), rtol=1e-12)
    assert np.abs(found.mean(-1)).max() < 1e-12
    end = lambda x: equilibrium(block, x, Backtracking(), **options)[0]
    assert not np.any(jax.grad(lambda x: jnp.sum(end(x)))(x))  # the start is forgotten


def test_what_is_left_of_the_error_is_neither_epsilon_nor_a_kink(x64):
    block, _, _ = setting(kind=EnergyTransformer, beta=nnx.Param(0.5))
    block.norm.delta[...] = jnp.zeros(6)
    x, r = jax.random.normal(jax.random.key(1), (2, 2, 4, 6))
    graphdef, state = nnx.split(block)

    @jax.jit  # exact to the last digit: it watches no energy, which is flat there
    def rest(state, x):
        block = nnx.merge(graphdef, state)
        step = lambda x, _: (unit(x + block.update(block.norm(1e3 * x))), None)
        return jax.lax.scan(step, x, length=1500)[0]

    x = rest(state, equilibrium(block, x)[0])
    rng = np.random.default_rng(7)
    way = jax.tree.map(lambda w: jnp.asarray(rng.normal(size=w.shape)), state)

    def value(h):
        moved = jax.tree.map(lambda w, d: w + h * d, state, way)
        return float(jnp.sum(r * nnx.merge(graphdef, moved).norm(rest(moved, x))))

    by_differences = (value(1e-5) - value(-1e-5)) / 2e-5
    end = lambda block: equilibrium(block, x, cg_steps=60, tolerance=1e-6)[0]
    # with ε in the stiffness 2e-5 and more
    assert_close(slope(block, end, r) @ flat(way), by_differences, rtol=5e-6)


def test_context_may_be_traced_and_batched(x64):
    block, _, _ = setting()
    masks = jnp.asarray(np.random.default_rng(0).random((3, 4, 4)) < 0.7)
    x = jax.random.normal(jax.random.key(3), (3, 4, 6))
    graphdef, state = nnx.split(block)

    def at_rest(state, mask, x):
        options = dict(evaluations=60, tolerance=0.05, mask=mask)
        block = nnx.merge(graphdef, state)
        return jnp.sum(equilibrium(block, x, Backtracking(), **options)[0] ** 3)

    alone = sum(flat(jax.jit(jax.grad(at_rest))(state, *one)) for one in zip(masks, x))
    assert np.isfinite(alone).all() and np.any(alone)
    vmapped = lambda state: jax.vmap(partial(at_rest, state))(masks, x).sum()
    again = lambda state: sum(
        jax.checkpoint(at_rest)(state, *one) for one in zip(masks, x)
    )
    for way in (vmapped, again):
        assert_close(flat(jax.jit(jax.grad(way))(state)), alone, rtol=1e-7)


def test_where_the_formula_does_not_hold_it_says_so_and_spoils_no_other(x64):
    "What is said of each alone is in nbs/engine/equilibria.ipynb."
    # two memories, 120 degrees apart
    block = EnergyTransformer(6, 0, 1, 2, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    one = jnp.array([1.0, -1, 0, 0, 0, 0]) / 2**0.5
    two = jnp.array([0.0, 0, 1, -1, 0, 0]) / 2**0.5
    ends = [0.5 * one + sign * 0.75**0.5 * two for sign in (1, -1)]
    block.memory.xi[...] = jnp.stack(ends)
    r = jax.random.normal(jax.random.key(2), (4, 1, 6))
    options = dict(evaluations=400, tolerance=1e-6)
    beside = solve(block, (one + 0.01 * two)[None], Backtracking(), **options)
    # between the two, nowhere, at one of them, out of range
    x = jnp.stack([1e3 * one[None], jnp.ones((1, 6)), beside.x, 1e200 * r[0]])
    # who settles has already
    options = dict(evaluations=2, tolerance=1e-5)
    run = partial(equilibrium, x=x, solver=Backtracking(), **options)
    end, how = run(block)
    np.testing.assert_array_equal(how.settled, [True, False, True, False])
    assert jnp.isfinite(end).all() and (end[1] == 0).all()

    graphdef, state = nnx.split(block)

    def read(which, **options):
        keep = jnp.zeros((4, 1, 1)).at[jnp.asarray(which)].set(1.0)
        end = lambda state: run(nnx.merge(graphdef, state), **options)[0]
        return flat(jax.jit(jax.grad(lambda s: jnp.sum(keep * r * end(s))))(state))

    for b in (0, 1, 3):
        assert np.isnan(read([b])).any()
    right = read([2])
    assert np.isfinite(right).all() and np.any(right)
    assert_close(read([0, 1, 2, 3], leave_out=True), right, rtol=1e-12)


def test_conjugate_gradients_solve_and_each_sample_for_itself(x64):
    "Against SciPy's, stopped early; the end is in nbs/engine/equilibria.ipynb."
    rng = np.random.default_rng(0)
    half = rng.normal(size=(3, 12, 12))
    S = jnp.asarray(half @ half.swapaxes(1, 2) + np.eye(12))
    v = jnp.asarray(rng.normal(size=(3, 4, 3))).at[1].set(0.0)
    S = S.at[2].set(-S[2])  # nothing to be had there
    product = lambda p: jnp.einsum("bij,bj->bi", S, p.reshape(3, 12)).reshape(3, 4, 3)
    found = _conjugate_gradients(product, v, 3)
    np.testing.assert_array_equal(found.w[1:], 0.0)
    np.testing.assert_array_equal(found.positive, [True, True, False])
    np.testing.assert_array_equal(found.residual[1:], [0, 1])
    S, v, w = S[0], v[0].ravel(), found.w[0].ravel()
    norm = jnp.linalg.norm
    assert_close(found.residual[0], norm(v - S @ w) / norm(v))
    assert 0 < found.curvature[0] < 1
    assert_close(w, jax.scipy.sparse.linalg.cg(S.dot, v, tol=0.0, maxiter=3)[0])


def test_memory_knows_neither_the_way_nor_the_number_of_cg_steps():
    block = EnergyTransformer(32, 2, 16, 64, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(block)

    def peak(**options):
        run = lambda state, x: equilibrium(
            nnx.merge(graphdef, state), x, Backtracking(), **options
        )
        slope = jax.jit(jax.grad(lambda state, x: jnp.sum(run(state, x)[0] ** 2)))
        compiled = slope.lower(state, jnp.ones((8, 16, 32))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short = peak(evaluations=10, cg_steps=4)
    assert peak(evaluations=400, cg_steps=60) < 1.1 * short + 1e5


# --- noise ---


def noisy(block, x, key, steps, *numbers, **context):
    return descend(block, x, steps, solver=Noisy(key, *numbers), **context)


def gibbs(block, x, key, steps, *numbers, **context):
    return descend(block, x, steps, solver=Langevin(key, *numbers), **context)


@pytest.mark.parametrize("way", [noisy, gibbs])
def test_steps_are_the_equation_each_with_its_own_noise(x64, way):
    "Those on the sphere forget lengths."
    block, x, _ = setting()
    gamma, h, number, key, given = 3.0, 0.05, 0.7, jax.random.key(3), {"edges": ring(4)}
    block.norm.rho[...] = jnp.log(jnp.expm1(gamma))
    last, path = way(block, x, key, 2, h, number, **given)
    at = x if way is noisy else unit(x)
    assert_close(path.energies.total[0], block.energy(block.norm(at), **given))
    for _ in range(2):
        key, now = jax.random.split(key)
        noise, u = (
            jax.random.normal(now, x.shape),
            block.update(block.norm(at), **given),
        )
        if way is noisy:
            at = at + h * (u + number * noise)
        else:
            drift = jnp.einsum("...ij,...j->...i", hessian(at, block.norm.gamma), u)
            at = unit(at + h * drift + (2 * h * number) ** 0.5 * noise)
    assert_close(last, at)
    if way is gibbs:
        again = way(block, 50.0 * x, jax.random.key(3), 2, h, number, **given)[0]
        assert_close(again, at)


def test_noise_and_temperature_may_be_traced_and_a_constant_token_finds_a_direction(
    x64,
):
    block, x, _ = setting()
    key = jax.random.key(0)
    at = lambda t: gibbs(block, x, key, 5, 0.01, t)[0]
    for rung, t in zip(jax.vmap(at)(jnp.array([0.1, 10.0])), (0.1, 10.0)):
        assert_close(rung, at(t))
    at = lambda s, a: noisy(block, x, key, 5, a, s)[0]
    assert_close(jax.jit(at)(0.3, 0.2), at(0.3, 0.2))
    c, path = gibbs(block, jnp.ones((4, 6)), key, 3)
    assert_close(rms(c, -1), np.ones(4), rtol=1e-12)
    assert jnp.isfinite(path.energies.total).all()
