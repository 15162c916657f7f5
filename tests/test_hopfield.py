"""Hopfield networks: every update against its formula, and what is promised (descent,
fixed points, likelihood) over random patterns.
"""

from math import exp, log

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st

from et_nbdev.hopfield import (
    hopfield_energy,
    learn,
    negative_log_likelihood,
    recall,
    retrieve,
    sample,
    sweep,
)
from et_nbdev.testing import assert_close, assert_descends, assert_gradient

pytestmark = pytest.mark.usefixtures("compile_quickly")

SEED = st.integers(0, 2**16)
BETAS = [0.3, 1.0, 4.0]
each_beta = pytest.mark.parametrize("beta", BETAS)
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
run_energy = jax.jit(hopfield_energy, static_argnames="beta")


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


# --- continuous network


def setup(seed, K=5, D=4, lead=(2, 3), scale=1.3):
    draw = np.random.default_rng(seed).normal
    x = jnp.asarray(2 * draw(size=(*lead, D)))
    return x, jnp.asarray(scale * draw(size=(K, D)))


def force(x, xi, beta):
    return jax.nn.softmax(beta * x @ xi.T, -1) @ xi - x


@each_beta
def test_continuous_energy_and_its_gradient(x64, beta):
    x, xi = setup(0)
    by_hand = lambda s: (
        sum(s * s) / 2 - log(sum(exp(beta * sum(m * s)) for m in np.asarray(xi))) / beta
    )
    E = run_energy(x, xi, beta=beta)
    expected = np.reshape([by_hand(s) for s in np.asarray(x).reshape(-1, 4)], (2, 3))
    assert_close(E, expected, rtol=1e-12)
    assert_gradient(lambda x: run_energy(x, xi, beta=beta), x, -force(x, xi, beta))
    # β is the length of the patterns
    unit = hopfield_energy(beta**0.5 * x, beta**0.5 * xi)
    assert_close(E, unit / beta, rtol=1e-12)


@examples(12)
@given(
    seed=SEED,
    beta=st.sampled_from(BETAS),
    alpha=st.sampled_from([0.1, 0.7, 1.0, 1.6, 2.0]),
)
def test_no_step_up_to_two_raises_the_energy(x64, seed, beta, alpha):
    x, xi = setup(seed)
    end, energies = run_retrieve(x, xi, beta, steps=25, step_size=alpha)
    assert energies.shape == (26, 2, 3)
    assert_descends(energies)
    E, u = hopfield_energy(x, xi, beta), force(x, xi, beta)
    bound = -alpha * (1 - alpha / 2) * jnp.sum(u**2, -1)
    assert (energies[1] - E <= bound + 1e-12).all()
    once = run_retrieve(x, xi, beta, steps=1, step_size=alpha)[0]
    assert_close(once, x + alpha * u, rtol=1e-12)
    assert_close(energies[-1], hopfield_energy(end, xi, beta), rtol=1e-12)


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


@each_beta
def test_likelihood_is_that_of_a_mixture_and_its_gradient_by_hand(x64, beta):
    "The normalizer, too: the density of the mixture has the integral 1."
    x, xi = setup(1, lead=(7,))
    w = jax.nn.softmax(beta * (xi**2).sum(-1) / 2)
    squares = ((x[:, None] - xi[None]) ** 2).sum(-1)
    density = jnp.exp(-beta / 2 * squares) @ w * (beta / 2 / jnp.pi) ** 2
    loss = run_loss(x, xi, beta=beta)
    assert_close(loss, -jnp.log(density).mean(), rtol=1e-12)
    p = jax.nn.softmax(beta * x @ xi.T, -1)
    by_hand = beta * (w[:, None] * xi - p.T @ x / len(x))
    assert_gradient(lambda xi: run_loss(x, xi, beta=beta), xi, by_hand)
    R2 = float((xi**2).sum(-1).max())
    learned, losses = run_learn(x, xi, beta=beta, steps=1)
    step = by_hand / (beta + beta**2 * R2 / 2)
    assert_close(learned, xi - step, rtol=1e-12)
    after = run_loss(x, learned, beta=beta)
    assert_close(losses, jnp.stack([loss, after]), rtol=1e-12)


@examples(8)
@given(seed=SEED, beta=st.sampled_from([*BETAS, 20.0]))
def test_learning_goes_downhill(x64, seed, beta):
    x, xi = setup(seed, K=4, lead=(15,))
    assert_descends(run_learn(x, xi, beta=beta, steps=300)[1])


def test_samples_follow_the_distribution(x64):
    xi, beta = jnp.asarray([[1.0, 0.0], [0.0, 1.5], [-0.5, -0.5]]), 2.0
    x = sample(jax.random.key(0), xi, 40_000, beta)
    w = jax.nn.softmax(beta * (xi**2).sum(-1) / 2)
    assert x.shape == (40_000, 2)
    assert_close(x.mean(0), w @ xi, atol=0.02, rtol=0)
    second = jnp.einsum("k,ki,kj->ij", w, xi, xi) + jnp.eye(2) / beta
    assert_close(x.T @ x / len(x), second, atol=0.03, rtol=0)


# --- bad input

xs, xis, square = jnp.ones((3, 4)), jnp.ones((2, 4)), ENERGIES["square"]
BAD = [
    (lambda: sweep(jnp.ones(3), xis, square), r"x: .*\(..., D\) with D = 4, got"),
    (lambda: retrieve(xs, jnp.ones((2, 5))), "x: .*D = 5"),
    (lambda: retrieve(xs, jnp.ones((0, 4))), r"xi: expected memories \(K, D\)"),
    (lambda: hopfield_energy(xs, xis, np.inf), "beta: expected"),
    (lambda: sample(jax.random.key(0), xis, 3, -1.0), "beta: expected"),
]


@pytest.mark.parametrize("call, says", BAD)
def test_bad_input_is_refused_by_name(call, says):
    with pytest.raises((TypeError, ValueError), match=says):
        call()
