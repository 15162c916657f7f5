"""The derivative of the place where a descent settles, noise that freezes, and noise
that does not.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.block import EnergyTransformer
from et_nbdev.dynamics import descend
from et_nbdev.equilibria import (
    Langevin,
    Noisy,
    _adjoint,
    _conjugate_gradients,
    equilibrium,
)
from et_nbdev.graph.energy import EdgeIndex, EdgeTransformer
from et_nbdev.norm import hessian
from et_nbdev.solvers import Backtracking, solve
from et_nbdev.stepping import rms as _rms
from et_nbdev.testing import assert_close

pytestmark = pytest.mark.usefixtures("compile_quickly")


def setting(N=4, D=6, seed=0):
    block = EdgeTransformer(
        D, 2, 3, 8, init_scale=0.5, param_dtype=jnp.float64, rngs=nnx.Rngs(seed)
    )
    block.norm.delta[...] = jax.random.normal(jax.random.key(5), (D,))
    return (
        block,
        jax.random.normal(jax.random.key(seed), (2, N, D)),
        jax.random.normal(jax.random.key(9), (2, N, D)),
    )


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize("kind", ["all pairs", "edges"])
def test_it_is_the_gradient_through_a_long_descent(x64, kind):
    block, x, r = setting(seed=3)
    chain = EdgeIndex([0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2], 4, backend="xla")
    context = {} if kind == "all pairs" else {"edges": chain}
    graphdef, state = nnx.split(block)

    def through_steps(state, x):
        block = nnx.merge(graphdef, state)
        # shortened at each step: the same path of g, and x stays
        step = lambda x, _: ((x + block.update(block.norm(x), **context)) / 1.5, None)
        return jnp.sum(r * block.norm(jax.lax.scan(step, x, length=300)[0]))

    def at_the_end(state, x):
        block = nnx.merge(graphdef, state)
        return jnp.sum(
            r
            * block.norm(
                equilibrium(
                    block,
                    x,
                    Backtracking(1.0, grow=1.5),
                    cg_steps=24,
                    evaluations=400,
                    **context,
                )[0]
            )
        )

    (a, (da, dx)), (b, (db, dy)) = (
        jax.jit(jax.value_and_grad(f, (0, 1)))(state, x)
        for f in (through_steps, at_the_end)
    )
    assert_close(b, a, rtol=1e-4)
    assert_close(flat(db), flat(da), rtol=1e-4)
    # the start is forgotten
    assert np.abs(dy).max() == 0 and np.abs(dx).max() < 1e-6 * np.abs(flat(da)).max()
    assert np.abs(flat(da)).min() < np.abs(flat(da)).max() and all(
        np.any(leaf) for leaf in jax.tree.leaves(db)
    )


def test_its_value_is_where_the_solver_ends_up_to_length(x64):
    block, x, _ = setting()
    end = solve(block, x, Backtracking(), evaluations=300, tolerance=1e-6)
    found, how = equilibrium(block, x, Backtracking(), evaluations=300, tolerance=1e-6)
    assert_close(block.norm(found), block.norm(end.x), rtol=1e-4)
    np.testing.assert_array_equal(how.settled, end.settled)
    np.testing.assert_array_equal(how.x, end.x)
    np.testing.assert_array_equal(how.evaluations, end.evaluations)
    assert_close(_rms(found, -1), np.ones((2, 4)), rtol=1e-12)
    assert np.abs(found.mean(-1)).max() < 1e-12


def through(end, state, graphdef, r):
    "The derivative by all weights of r·g at the place where `end` leads."
    return flat(
        jax.jit(
            jax.grad(
                lambda state: (lambda block: jnp.sum(r * block.norm(end(block))))(
                    nnx.merge(graphdef, state)
                )
            )
        )(state)
    )


def test_what_is_left_of_the_error_is_neither_epsilon_nor_a_kink(x64):
    block = EnergyTransformer(
        6,
        2,
        3,
        8,
        init_scale=0.5,
        learn_beta=True,
        param_dtype=jnp.float64,
        rngs=nnx.Rngs(0),
    )
    x, r = jax.random.normal(jax.random.key(1), (2, 2, 4, 6))
    graphdef, state = nnx.split(block)
    unit = lambda x: (x - x.mean(-1, keepdims=True)) / _rms(x, -1)[..., None]

    @jax.jit
    # exact to the last digit: it watches no energy, which is flat there
    def rest(state, x):
        block = nnx.merge(graphdef, state)
        return jax.lax.scan(
            lambda x, _: (unit(x + block.update(block.norm(1e3 * x))), None),
            x,
            length=1500,
        )[0]

    x = rest(state, equilibrium(block, x)[0])
    leaves, tree = jax.tree.flatten(state)
    way = jax.tree.unflatten(
        tree,
        [
            jax.random.normal(k, w.shape)
            for k, w in zip(jax.random.split(jax.random.key(7), len(leaves)), leaves)
        ],
    )

    def value(h):
        return float(
            jnp.sum(
                r
                * (lambda moved: nnx.merge(graphdef, moved).norm(rest(moved, x)))(
                    jax.tree.map(lambda w, d: w + h * d, state, way)
                )
            )
        )

    by_differences = (value(1e-5) - value(-1e-5)) / 2e-5
    g = through(
        lambda block: equilibrium(block, x, cg_steps=60, tolerance=1e-6)[0],
        state,
        graphdef,
        r,
    )
    # with ε in the stiffness 2e-5 and more
    assert_close(g @ flat(way), by_differences, rtol=5e-6)


def test_masks_may_be_traced(x64):
    block, _, _ = setting()
    masks = jnp.asarray(np.random.default_rng(0).random((3, 4, 4)) < 0.7)
    x = jax.random.normal(jax.random.key(3), (3, 4, 6))
    graphdef, state = nnx.split(block)

    def at_rest(state, mask, x):
        return jnp.sum(
            equilibrium(
                nnx.merge(graphdef, state),
                x,
                Backtracking(),
                mask=mask,
                evaluations=60,
                tolerance=0.05,
            )[0]
            ** 3
        )

    alone = sum(flat(g) for g in map(jax.jit(jax.grad(at_rest)), [state] * 3, masks, x))
    assert np.isfinite(alone).all() and np.any(alone)
    vmapped = lambda state: jax.vmap(lambda mask, x: at_rest(state, mask, x))(
        masks, x
    ).sum()
    scanned = lambda state: jax.lax.scan(
        lambda total, one: (total + at_rest(state, *one), None),
        jnp.zeros(()),
        (masks, x),
    )[0]
    again = lambda state: sum(
        jax.checkpoint(at_rest)(state, masks[i], x[i]) for i in range(3)
    )
    for way in (vmapped, scanned, again):
        assert_close(flat(jax.jit(jax.grad(way))(state)), alone, rtol=1e-7)


def test_where_the_formula_does_not_hold_it_says_so(x64):
    # two memories, 120 degrees apart
    block = EnergyTransformer(6, 0, 1, 2, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    one = np.array([1.0, -1, 0, 0, 0, 0]) / 2**0.5
    two = np.array([0.0, 0, 1, -1, 0, 0]) / 2**0.5
    block.memory.xi[...] = jnp.asarray(
        [0.5 * one + 0.75**0.5 * two, 0.5 * one - 0.75**0.5 * two]
    )
    r = jax.random.normal(jax.random.key(2), (4, 1, 6))
    beside = solve(
        block,
        jnp.asarray(one + 0.01 * two)[None],
        Backtracking(),
        evaluations=400,
        tolerance=1e-6,
    )
    assert beside.settled and abs(beside.energies.total[-1] + 3) < 1e-4
    # between the two, nowhere, at one of them, out of range
    x = jnp.stack(
        [1e3 * jnp.asarray(one)[None], jnp.ones((1, 6)), beside.x, 1e200 * r[0]]
    )
    graphdef, state = nnx.split(block)
    # who settles has already
    run = partial(
        equilibrium, x=x, solver=Backtracking(), evaluations=2, tolerance=1e-5
    )
    end, how = run(block)
    np.testing.assert_array_equal(how.settled, [True, False, True, False])
    assert jnp.isfinite(end).all() and (end[1] == 0).all()
    by_hand = _adjoint(block, end, r)
    assert (
        by_hand.curvature[0] < -0.1
        and by_hand.curvature[2] > 0.1
        and by_hand.residual[2] < 1e-6
    )
    assert abs(how.energies.total[-1, 0] + 1.5) < 1e-4
    np.testing.assert_array_equal(by_hand.positive[jnp.array([0, 2])], [False, True])

    def slope(which, **options):
        def loss(state):
            block = nnx.merge(graphdef, state)
            return jnp.sum((r * run(block, **options)[0])[jnp.asarray(which)])

        return flat(jax.jit(jax.grad(loss))(state))

    for b in (0, 1, 3):
        assert np.isnan(slope([b])).any()
    right = slope([2])
    assert np.isfinite(right).all() and np.any(right)
    assert_close(slope([0, 1, 2, 3], leave_out=True), right, rtol=1e-12)


def test_the_default_call_does_for_a_flat_valley(x64):
    block = EnergyTransformer(
        16, 2, 8, 32, init_scale=0.25, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    )
    x, r = (jax.random.normal(jax.random.key(k), (2, 12, 16)) for k in (1, 2))
    graphdef, state = nnx.split(block)
    found, best = (
        through(lambda block: equilibrium(block, x, **o)[0], state, graphdef, r)
        for o in ({}, dict(cg_steps=200, tolerance=2e-8, evaluations=600))
    )
    assert np.linalg.norm(found - best) < 1e-2 * np.linalg.norm(best)


def test_conjugate_gradients_solve_and_each_sample_for_itself(x64):
    rng = np.random.default_rng(0)
    half = rng.normal(size=(3, 12, 12))
    K = jnp.asarray(half @ half.swapaxes(1, 2) + np.eye(12))
    v = jnp.asarray(rng.normal(size=(3, 4, 3)))
    K = K.at[2].set(-K[2])  # nothing to be had there
    v = v.at[1].set(0.0)
    product = lambda p: jnp.einsum("bij,bj->bi", K, p.reshape(3, 12)).reshape(3, 4, 3)
    w, residual, curvature = found = _conjugate_gradients(product, v, 60)
    assert_close(w[0].ravel(), jnp.linalg.solve(K[0], v[0].ravel()), rtol=1e-6)
    np.testing.assert_array_equal(w[1:], 0.0)
    np.testing.assert_array_equal(found.positive, [True, True, False])
    assert residual[0] < 1e-12 and residual[1] == 0 and residual[2] == 1
    few, left, curvature = (a[0] for a in _conjugate_gradients(product, v, 3))
    assert_close(
        left,
        jnp.linalg.norm(v[0].ravel() - K[0] @ few.ravel()) / jnp.linalg.norm(v[0]),
        rtol=1e-9,
    )
    assert 0 < curvature < 1
    theirs, _ = jax.scipy.sparse.linalg.cg(
        lambda p: K[0] @ p, v[0].ravel(), tol=0.0, maxiter=3
    )
    assert_close(few.ravel(), theirs, rtol=1e-9)
    basis = jnp.stack(
        [jnp.linalg.matrix_power(K[0], i) @ v[0].ravel() for i in range(3)], -1
    )
    # the best in the Krylov space
    best = basis @ jnp.linalg.solve(basis.T @ K[0] @ basis, basis.T @ v[0].ravel())
    assert_close(few.ravel(), best, rtol=1e-6)


def test_memory_knows_neither_the_way_nor_the_number_of_cg_steps():
    block = EnergyTransformer(32, 2, 16, 64, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(block)

    def peak(evaluations, cg_steps):
        loss = lambda state, x: jnp.sum(
            equilibrium(
                nnx.merge(graphdef, state),
                x,
                Backtracking(),
                evaluations=evaluations,
                cg_steps=cg_steps,
            )[0]
            ** 2
        )
        return (
            jax.jit(jax.grad(loss))
            .lower(state, jnp.ones((8, 16, 32)))
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    assert peak(400, 60) < 1.1 * peak(10, 4) + 1e5


def noisy(block, x, key, steps, *numbers, **context):
    return descend(block, x, steps, solver=Noisy(key, *numbers), **context)


def gibbs(block, x, key, steps, *numbers, **context):
    return descend(block, x, steps, solver=Langevin(key, *numbers), **context)


def test_without_noise_it_is_descend_and_with_it_a_function_of_the_key(x64):
    block, x, _ = setting()
    still, path = noisy(block, x, jax.random.key(0), 5, 0.2, 0.0)
    last, plain = descend(block, x, 5, 0.2)
    assert_close(still, last, rtol=1e-12)
    assert_close(path.energies.total, plain.energies.total, rtol=1e-12)
    one, again, other = (
        noisy(block, x, jax.random.key(k), 5, 0.2, 0.5)[0] for k in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, other)


def test_the_noise_of_one_step_has_the_deviation_it_says(x64):
    block, x, _ = setting()
    crowd = jnp.broadcast_to(x[0], (4000, 4, 6))
    moved = (
        noisy(block, crowd, jax.random.key(0), 1, 0.1, 0.3)[0]
        - descend(block, crowd, 1, 0.1)[0]
    )
    np.testing.assert_allclose(moved.std(), 0.1 * 0.3, rtol=0.01)
    assert abs(moved.mean()) < 5e-4


def exact(block, temperature, n=120):
    """Mean and deviation of E under exp(-E/𝒯) on two circles, the share of every pair
    of quarters of them, and the plane they lie in.
    """
    plane = np.linalg.svd(np.ones((1, 3)))[2][1:]
    angle = np.arange(n) * 2 * np.pi / n
    circle = 3**0.5 * (
        np.cos(angle)[:, None] * plane[:1] + np.sin(angle)[:, None] * plane[1:]
    )
    E = np.asarray(
        block.energy(
            block.norm(
                jnp.asarray(
                    np.stack(np.broadcast_arrays(circle[:, None], circle[None]), -2)
                )
            )
        )
    )
    p = np.exp(-(E - E.min()) / temperature)
    p /= p.sum()
    mean = (p * E).sum()
    return (
        mean,
        ((p * (E - mean) ** 2).sum()) ** 0.5,
        p.reshape(4, n // 4, 4, n // 4).sum((1, 3)),
        plane,
    )


@pytest.mark.parametrize("temperature", [4.0, 10.0])
def test_gibbs_samples_what_it_says_from_any_start(x64, temperature):
    block = EnergyTransformer(
        3, 1, 2, 4, beta=1.0, init_scale=0.8, param_dtype=jnp.float64, rngs=nnx.Rngs(3)
    )
    mean, deviation, shares, plane = exact(block, temperature)
    for seed in (0, 1):
        start = jnp.broadcast_to(
            jax.random.normal(jax.random.key(10 + seed), (2, 3)), (3000, 2, 3)
        )
        keys = jax.random.split(jax.random.key(seed), 3)
        half, _ = gibbs(block, start, keys[0], 800, 0.005, temperature)
        middle, path = gibbs(block, half, keys[1], 800, 0.005, temperature)
        last, later = gibbs(block, middle, keys[2], 400, 0.005, temperature)
        c = np.concatenate([middle, last])
        assert_close(_rms(c, -1), np.ones((6000, 2)), rtol=1e-12)
        energies = np.concatenate([path.energies.total, later.energies.total])
        assert abs(energies.mean() - mean) < 0.06 * deviation
        np.testing.assert_allclose(energies.std(), deviation, rtol=0.1)
        quarter = (np.arctan2(c @ plane[1], c @ plane[0]) // (np.pi / 2)).astype(
            int
        ) % 4
        found = np.histogram2d(*quarter.T, bins=4, range=[(0, 4), (0, 4)])[0] / len(c)
        # chance alone: 0.02
        assert (
            np.abs(found - shares).sum() / 2
            < 0.05
            < 0.1
            < np.abs(1 / 16 - shares).sum() / 2
        )


def test_a_step_on_the_sphere_is_the_equation(x64):
    block, x, _ = setting()
    gamma, h, temperature, key = 3.0, 0.05, 0.7, jax.random.key(3)
    block.norm.rho[...] = jnp.log(jnp.expm1(gamma))
    unit = lambda x: (x - x.mean(-1, keepdims=True)) / _rms(x, -1)[..., None]
    c = unit(x)
    noise = jax.random.normal(jax.random.split(key)[1], x.shape, x.dtype)
    drift = jnp.einsum(
        "...ij,...j->...i", hessian(c, block.norm.gamma), block.update(block.norm(c))
    )
    assert_close(
        gibbs(block, x, key, 1, h, temperature)[0],
        unit(c + h * drift + (2 * h * temperature) ** 0.5 * noise),
        rtol=1e-9,
    )


def test_noise_and_temperature_may_be_traced_and_a_constant_token_finds_a_direction(
    x64,
):
    block, x, _ = setting()
    key = jax.random.key(0)
    ladder = jax.vmap(lambda t: gibbs(block, x, key, 5, 0.01, t)[0])(
        jnp.array([0.1, 10.0])
    )
    for rung, t in zip(ladder, (0.1, 10.0)):
        assert_close(rung, gibbs(block, x, key, 5, 0.01, t)[0], rtol=1e-9)
    assert_close(
        jax.jit(lambda s, a: noisy(block, x, key, 5, a, s)[0])(0.3, 0.2),
        noisy(block, x, key, 5, 0.2, 0.3)[0],
        rtol=1e-9,
    )
    c, path = gibbs(block, jnp.ones((4, 6)), key, 3)
    assert_close(_rms(c, -1), np.ones(4), rtol=1e-12)
    assert jnp.isfinite(path.energies.total).all()


def test_gibbs_forgets_lengths_and_works_on_edges(x64):
    block, x, _ = setting()
    edges = EdgeIndex([0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2], 4, backend="xla")
    one, other = (
        gibbs(block, s * x, jax.random.key(0), 20, 0.01, 1.0, edges=edges)
        for s in (1.0, 50.0)
    )
    assert_close(other[0], one[0], rtol=1e-9)
    unit = (x - x.mean(-1, keepdims=True)) / _rms(x, -1)[..., None]
    start = block.energy(block.norm(unit), edges=edges)
    assert_close(one[1].energies.total[0], start, rtol=1e-9)


NAN, INF, KEY = float("nan"), float("inf"), jax.random.key(0)


@pytest.mark.parametrize(
    "call, error, match",
    [
        *[
            (lambda b, x, n=n: equilibrium(b, x, cg_steps=n), ValueError, "^cg_steps: ")
            for n in (0, -1, 1.5)
        ],
        (lambda b, x: equilibrium(b, x, evaluations=0), ValueError, "^evaluations: "),
        (
            lambda b, x: equilibrium(b, x.astype(jnp.bfloat16)),
            TypeError,
            "^x: .*bfloat16",
        ),
        *[
            (
                lambda b, x, f=f: f(b, x.astype(jnp.bfloat16), KEY, 3),
                TypeError,
                "^x: .*bfloat16",
            )
            for f in (noisy, gibbs)
        ],
        *[
            (lambda b, x, v=v: noisy(b, x, KEY, 3, 0.1, v), ValueError, "^noise: ")
            for v in (-1.0, NAN, INF)
        ],
        *[
            (lambda b, x, f=f, v=v: f(b, x, KEY, 3, v), ValueError, "^step_size: ")
            for f in (noisy, gibbs)
            for v in (0.0, -1.0, NAN, INF)
        ],
        *[
            (lambda b, x, f=f: f(b, x, KEY, -1), ValueError, "^steps: ")
            for f in (noisy, gibbs)
        ],
        *[
            (
                lambda b, x, v=v: gibbs(b, x, KEY, 3, 0.01, v),
                ValueError,
                "^temperature: ",
            )
            for v in (0.0, -1.0, NAN, INF)
        ],
        *[
            (lambda b, x, f=f: f(b, x[..., :5], KEY, 3), ValueError, "^x: ")
            for f in (noisy, gibbs)
        ],
    ],
)
def test_bad_input_is_refused_by_name(call, error, match):
    block = EnergyTransformer(6, 2, 3, 8, rngs=nnx.Rngs(0))
    with pytest.raises(error, match=match):
        call(block, jnp.ones((2, 4, 6)))
