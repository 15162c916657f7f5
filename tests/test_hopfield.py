"""Hopfield networks: every update against its formula, and what is promised (descent,
fixed points, likelihood) over random patterns.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st

from et_nbdev.hopfield import (
    learn,
    negative_log_likelihood,
    recall,
    retrieve,
    sample,
    sweep,
)
from et_nbdev.testing import assert_close, assert_descends

pytestmark = pytest.mark.usefixtures("compile_quickly")

SEED = st.integers(0, 2**16)
ENERGIES = {
    "square": lambda a: -(a**2).sum(-1) / 2,
    "cube": lambda a: -(a**3).sum(-1),
    "rectified": lambda a: -(jnp.maximum(a, 0) ** 3).sum(-1),
    "exponential": lambda a: -jax.nn.logsumexp(a, -1),
}
each_energy = pytest.mark.parametrize("name", ENERGIES)

# One compiled program for each shape, whatever the values.
run_sweep = jax.jit(sweep, static_argnames="energy")
run_recall = jax.jit(recall, static_argnames=("energy", "most"))
run_retrieve = jax.jit(retrieve, static_argnames="steps")
run_learn = jax.jit(learn, static_argnames=("steps", "beta"))
run_loss = jax.jit(negative_log_likelihood, static_argnames="beta")


def spins(rng, *shape):
    return rng.choice([-1.0, 1.0], shape)


@each_energy
@examples(6)
@given(seed=SEED)
def test_a_sweep_flips_what_pays_and_nothing_else(x64, name, seed):
    rng, energy = np.random.default_rng(seed), ENERGIES[name]
    x, xi = spins(rng, 2, 3, 6), spins(rng, 2, 6)  # few patterns of ±1: many ties
    if name == "exponential":  # whose ties would be broken by rounding
        xi = rng.normal(size=(5, 6))
    end, energies = run_sweep(x, xi, energy)
    assert energies.shape == (7, 2, 3)
    assert_descends(energies, rtol=1e-12)
    of = lambda x: np.asarray(energy(jnp.asarray(x @ xi.T)))
    for i in range(6):
        other = np.where(np.arange(6) == i, -x, x)
        assert_close(energies[i], of(x), rtol=1e-9, atol=1e-12)
        x[..., i] = np.where(of(other) < of(x), -x[..., i], x[..., i])
    assert_close(end, x)
    assert_close(energies[-1], of(x), rtol=1e-9, atol=1e-12)


def test_recall_counts_its_sweeps(x64):
    rng, energy = np.random.default_rng(1), ENERGIES["square"]
    xi, states = jnp.asarray(spins(rng, 12, 40)), [jnp.asarray(spins(rng, 20, 40))]
    while len(states) < 2 or (states[-1] != states[-2]).any():
        states.append(run_sweep(states[-1], xi, energy)[0])
    end, sweeps = run_recall(states[0], xi, energy)
    assert_close(end, states[-1])
    assert sweeps == len(states) - 1 > 2
    once, sweeps = run_recall(states[0], xi, energy, most=1)
    assert_close(once, states[1])
    assert sweeps == 1


# --- continuous network: its energy and its descent are in nbs/01_recall.ipynb


def setup(seed, K=5, D=4, lead=(2, 3), scale=1.3):
    draw = np.random.default_rng(seed).normal
    x = jnp.asarray(2 * draw(size=(*lead, D)))
    return x, jnp.asarray(scale * draw(size=(K, D)))


def test_huge_scores_stay_finite_and_numbers_may_be_arrays():
    x = 1e4 * jnp.ones((2, 3))
    xi = jnp.array([[1.0, 1, 1], [-1.0, 1, 1]])
    end, energies = run_retrieve(x, xi, 50.0, steps=2)
    assert jnp.isfinite(end).all() and jnp.isfinite(energies).all()
    assert end.dtype == energies.dtype == jnp.float32
    for two in (2, np.float32(2), jnp.array(2), jnp.bfloat16(2)):
        assert_close(
            run_retrieve(x, xi, two, 3, two)[0], run_retrieve(x, xi, 2.0, 3, 2.0)[0]
        )


# --- exact likelihood


def test_a_step_of_learning_is_as_long_as_the_bound_allows(x64):
    "The likelihood and its gradient are in nbs/01b_hopfield_learning.ipynb."
    (x, xi), beta = setup(1, lead=(7,)), 4.0
    loss = lambda xi: run_loss(x, xi, beta=beta)
    bound = beta + beta**2 * float((xi**2).sum(-1).max()) / 2
    learned, losses = run_learn(x, xi, beta=beta, steps=1)
    assert_close(learned, xi - jax.grad(loss)(xi) / bound, rtol=1e-12)
    assert_close(losses, jnp.stack([loss(xi), loss(learned)]), rtol=1e-12)


def test_samples_follow_the_distribution(x64):
    xi, beta = jnp.asarray([[1.0, 0.0], [0.0, 1.5], [-0.5, -0.5]]), 2.0
    x = sample(jax.random.key(0), xi, 40_000, beta)
    w = jax.nn.softmax(beta * (xi**2).sum(-1) / 2)
    assert x.shape == (40_000, 2)
    assert_close(x.mean(0), w @ xi, atol=0.02, rtol=0)
    second = jnp.einsum("k,ki,kj->ij", w, xi, xi) + jnp.eye(2) / beta
    assert_close(x.T @ x / len(x), second, atol=0.03, rtol=0)
