"""The derivative of the place where a descent settles, noise that freezes, and noise that does not."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.block import EnergyTransformer
from et_nbdev.dynamics import descend
from et_nbdev.equilibria import conjugate_gradients, equilibrium, gibbs, noisy_descent, spread
from et_nbdev.graph.energy import EdgeIndex
from et_nbdev.solvers import Backtracking, solve
from et_nbdev.testing import assert_close

pytestmark = pytest.mark.usefixtures("compile_quickly")


def setting(N=4, D=6, seed=0):
    block = EnergyTransformer(D, 2, 3, 8, init_scale=0.5, param_dtype=jnp.float64, rngs=nnx.Rngs(seed))
    block.norm.delta[...] = jax.random.normal(jax.random.key(5), (D,))
    return block, jax.random.normal(jax.random.key(seed), (2, N, D)), jax.random.normal(jax.random.key(9), (2, N, D))


def flat(tree): return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize("kind", ["all pairs", "edges"])
def test_it_is_the_gradient_through_a_long_descent(x64, kind):
    block, x, r = setting(seed=3)
    mask = None if kind == "all pairs" else EdgeIndex([0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2], 4, backend="xla")
    graphdef, state = nnx.split(block)
    def through_steps(state, x):
        block = nnx.merge(graphdef, state)
        step = lambda x, _: ((x + block.update(block.norm(x), mask)) / 1.5, None)           # shortened at each step: the same path of g, and x stays
        return jnp.sum(r * block.norm(jax.lax.scan(step, x, length=300)[0]))
    def at_the_end(state, x):
        block = nnx.merge(graphdef, state)
        return jnp.sum(r * block.norm(equilibrium(block, x, Backtracking(1.0, grow=1.5), terms=24, tolerance=1e-9, evaluations=400, mask=mask)))
    (a, (da, dx)), (b, (db, dy)) = (jax.jit(jax.value_and_grad(f, (0, 1)))(state, x) for f in (through_steps, at_the_end))
    assert_close(b, a, rtol=1e-4)
    assert_close(flat(db), flat(da), rtol=1e-4)
    assert np.abs(dy).max() == 0 and np.abs(dx).max() < 1e-6 * np.abs(flat(da)).max()     # the start is forgotten
    assert np.abs(flat(da)).min() < np.abs(flat(da)).max() and all(np.any(leaf) for leaf in jax.tree.leaves(db))


def test_its_value_is_where_the_solver_ends_up_to_length(x64):
    block, x, _ = setting()
    end = solve(block, x, Backtracking(), evaluations=300, tolerance=1e-6)
    found = equilibrium(block, x, Backtracking(), evaluations=300, tolerance=1e-6)
    assert_close(block.norm(found), block.norm(end.x), rtol=1e-4)
    assert_close(spread(found, -1)[..., 0], np.ones((2, 4)), rtol=1e-12); assert np.abs(found.mean(-1)).max() < 1e-12


def test_conjugate_gradients_solve_and_each_sample_for_itself(x64):
    rng = np.random.default_rng(0)
    half = rng.normal(size=(3, 12, 12))
    K = jnp.asarray(half @ half.swapaxes(1, 2) + np.eye(12)); v = jnp.asarray(rng.normal(size=(3, 4, 3)))
    K = K.at[2].set(-K[2])                                                                # nothing to be had there
    v = v.at[1].set(0.0)
    product = lambda p: jnp.einsum("bij,bj->bi", K, p.reshape(3, 12)).reshape(3, 4, 3)
    w = conjugate_gradients(product, v, 60)
    assert_close(w[0].ravel(), jnp.linalg.solve(K[0], v[0].ravel()), rtol=1e-6)
    np.testing.assert_array_equal(w[1:], 0.0)
    few = conjugate_gradients(product, v, 3)[0]
    basis = jnp.stack([jnp.linalg.matrix_power(K[0], i) @ v[0].ravel() for i in range(3)], -1)
    best = basis @ jnp.linalg.solve(basis.T @ K[0] @ basis, basis.T @ v[0].ravel())       # the best in the Krylov space
    assert_close(few.ravel(), best, rtol=1e-6)


def test_memory_knows_neither_the_way_nor_the_number_of_terms():
    block = EnergyTransformer(32, 2, 16, 64, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(block)
    def peak(evaluations, terms):
        loss = lambda state, x: jnp.sum(equilibrium(nnx.merge(graphdef, state), x, Backtracking(), evaluations=evaluations, terms=terms) ** 2)
        return jax.jit(jax.grad(loss)).lower(state, jnp.ones((8, 16, 32))).compile().memory_analysis().temp_size_in_bytes
    assert peak(400, 60) < 1.1 * peak(10, 4) + 1e5


def test_without_noise_it_is_descend_and_with_it_a_function_of_the_key(x64):
    block, x, _ = setting()
    still, path = noisy_descent(block, x, jax.random.key(0), 5, 0.2, 0.0)
    last, plain = descend(block, x, 5, 0.2)
    assert_close(still, last, rtol=1e-12); assert_close(path.total, plain.energies.total, rtol=1e-12)
    one, again, other = (noisy_descent(block, x, jax.random.key(k), 5, 0.2, 0.5)[0] for k in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.allclose(one, other)


def test_the_noise_of_one_step_has_the_deviation_it_says(x64):
    block, x, _ = setting()
    crowd = jnp.broadcast_to(x[0], (4000, 4, 6))
    moved = noisy_descent(block, crowd, jax.random.key(0), 1, 0.1, 0.3)[0] - descend(block, crowd, 1, 0.1)[0]
    np.testing.assert_allclose(moved.std(), 0.1 * 0.3, rtol=0.01)
    assert abs(moved.mean()) < 5e-4


def exact(block, temperature, n=120):
    "Mean and deviation of E under exp(-E/𝒯) on two circles."
    plane = np.linalg.svd(np.ones((1, 3)))[2][1:]
    angle = np.arange(n) * 2 * np.pi / n
    circle = 3**0.5 * (np.cos(angle)[:, None] * plane[:1] + np.sin(angle)[:, None] * plane[1:])
    E = np.asarray(block.energy(block.norm(jnp.asarray(np.stack(np.broadcast_arrays(circle[:, None], circle[None]), -2)))))
    p = np.exp(-(E - E.min()) / temperature); p /= p.sum()
    mean = (p * E).sum()
    return mean, ((p * (E - mean) ** 2).sum()) ** 0.5


@pytest.mark.parametrize("temperature", [4.0, 10.0])
def test_gibbs_samples_what_it_says_from_any_start(x64, temperature):
    block = EnergyTransformer(3, 1, 2, 4, beta=1.0, init_scale=0.8, param_dtype=jnp.float64, rngs=nnx.Rngs(3))
    mean, deviation = exact(block, temperature)
    for seed in (0, 1):
        start = jnp.broadcast_to(jax.random.normal(jax.random.key(10 + seed), (2, 3)), (3000, 2, 3))
        c, path = gibbs(block, start, jax.random.key(seed), 1600, 0.005, temperature)
        assert_close(spread(c, -1)[..., 0], np.ones((3000, 2)), rtol=1e-12)
        assert abs(path.total[800:].mean() - mean) < 0.06 * deviation
        np.testing.assert_allclose(path.total[800:].std(), deviation, rtol=0.1)


def test_gibbs_forgets_lengths_and_works_on_edges(x64):
    block, x, _ = setting()
    mask = EdgeIndex([0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2], 4, backend="xla")
    one, other = (gibbs(block, s * x, jax.random.key(0), 20, 0.01, 1.0, mask=mask) for s in (1.0, 50.0))
    assert_close(other[0], one[0], rtol=1e-9)
    assert_close(one[1].total[0], block.energy(block.norm(x / spread(x, -1) - (x / spread(x, -1)).mean(-1, keepdims=True)), mask), rtol=1e-9)


NAN, INF = float("nan"), float("inf")

@pytest.mark.parametrize("call, error, match", [
    *[(lambda b, x, n=n: equilibrium(b, x, terms=n), ValueError, "^terms: ") for n in (0, -1, 1.5)],
    (lambda b, x: equilibrium(b, x, evaluations=0), ValueError, "^evaluations: "),
    *[(lambda b, x, v=v: noisy_descent(b, x, jax.random.key(0), noise=v), ValueError, "^noise: ") for v in (-1.0, NAN, INF)],
    *[(lambda b, x, f=f, v=v: f(b, x, jax.random.key(0), step_size=v), ValueError, "^step_size: ") for f in (noisy_descent, gibbs) for v in (0.0, -1.0, NAN, INF)],
    *[(lambda b, x, f=f: f(b, x, jax.random.key(0), steps=-1), ValueError, "^steps: ") for f in (noisy_descent, gibbs)],
    *[(lambda b, x, v=v: gibbs(b, x, jax.random.key(0), temperature=v), ValueError, "^temperature: ") for v in (0.0, -1.0, NAN, INF)],
    *[(lambda b, x, f=f: f(b, x[..., :5], jax.random.key(0)), ValueError, "^x: ") for f in (noisy_descent, gibbs)],
])
def test_bad_input_is_refused_by_name(call, error, match):
    block = EnergyTransformer(6, 2, 3, 8, rngs=nnx.Rngs(0))
    with pytest.raises(error, match=match): call(block, jnp.ones((2, 4, 6)))
