"""Hopfield networks: every update against its formula in loops, every promise (descent,
cycles, fixed points, likelihood, attention) over random patterns.
"""

import json
import runpy
from math import exp, log
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import examples
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from et_nbdev.hopfield.classical import (
    Exponential,
    Polynomial,
    _dense_sweep,
    asynchronous,
    dense_energy,
    hebb,
    ising_energy,
    settle,
    synchronous,
)
from et_nbdev.hopfield.continuous import (
    _continuous_energy_and_update,
    _sharing,
    _unit_memories,
    retrieve,
)
from et_nbdev.hopfield.learning import (
    _log_partition,
    hopfield_attention,
    learn,
    negative_log_likelihood,
    sample,
)
from et_nbdev.testing import assert_close, assert_descends, assert_gradient

pytestmark = pytest.mark.usefixtures("compile_quickly")

SEED = st.integers(0, 2**16)
INTERACTIONS = [Polynomial(2), Polynomial(3), Polynomial(4), Exponential()]
BETAS = [0.3, 1.0, 4.0]
each_interaction = pytest.mark.parametrize("F", INTERACTIONS, ids=str)
each_beta = pytest.mark.parametrize("beta", BETAS)

# One compiled program for each shape, whatever the values.
run_asynchronous = jax.jit(asynchronous)
run_sweep = jax.jit(_dense_sweep, static_argnames="F")
run_retrieve = jax.jit(retrieve, static_argnames="steps")
run_learn = jax.jit(learn, static_argnames=("steps", "beta"))


def spins(rng, *shape):
    return rng.choice([-1.0, 1.0], shape)


def couplings(rng, D):
    """Symmetric, with a diagonal that is not negative: what the proof of descent asks
    for.
    """
    W = rng.normal(size=(D, D))
    W = W + W.T
    np.fill_diagonal(W, abs(np.diag(W)))
    return W


def each(f, x):
    "A function of one state, at every state of a batch."
    return np.reshape([f(s) for s in x.reshape(-1, x.shape[-1])], x.shape[:-1])


def ising(x, W, b):
    return -sum(
        W[i, j] * x[i] * x[j] for i in range(len(x)) for j in range(len(x))
    ) / 2 + sum(b * x)


def dense(x, xi, F):
    D = len(x)
    if isinstance(F, Exponential):
        return -sum(exp(sum(m * x) - D) for m in xi)
    return -sum(sum(m * x) ** F.n for m in xi) / D**F.n


# ------------------------------------------------------------------------------------
# classical network


def test_hebb_adds_up_outer_products(x64):
    xi = np.random.default_rng(0).normal(size=(3, 5))
    W = [
        [sum(xi[m, i] * xi[m, j] for m in range(3)) for j in range(5)] for i in range(5)
    ]
    assert_close(hebb(jnp.asarray(xi), self_coupling=True), W, rtol=1e-14)
    assert_close(hebb(jnp.asarray(xi)), np.array(W) * (1 - np.eye(5)), rtol=1e-14)


def test_classical_energy_and_field_are_the_formulas(x64):
    rng = np.random.default_rng(1)
    x, b = spins(rng, 2, 3, 5), rng.normal(size=5)
    W = couplings(rng, 5)
    assert_close(
        ising_energy(jnp.asarray(x), jnp.asarray(W), jnp.asarray(b)),
        each(lambda s: ising(s, W, b), x),
        rtol=1e-12,
    )
    assert_close(
        ising_energy(jnp.asarray(x), jnp.asarray(W)),
        each(lambda s: ising(s, W, 0 * b), x),
        rtol=1e-12,
    )
    # not symmetric: rows and columns must not be mixed up
    arrow = rng.normal(size=(5, 5))
    expected = [
        [np.sign([sum(arrow[i] * s) - b[i] for i in range(5)]) for s in part]
        for part in x
    ]
    assert_close(
        synchronous(jnp.asarray(x), jnp.asarray(arrow), jnp.asarray(b)),
        np.array(expected),
    )
    i = 3
    assert_close(
        asynchronous(jnp.asarray(x), jnp.asarray(arrow), jnp.asarray(b), [i])[0][
            ..., i
        ],
        np.array(expected)[..., i],
    )


def test_a_neuron_without_a_field_stays(x64):
    x = jnp.array([[1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]])
    W = jnp.zeros((3, 3)).at[0, 1].set(1.0).at[1, 0].set(1.0)
    assert_close(synchronous(x, W), jnp.array([[-1.0, 1.0, 1.0], [-1.0, -1.0, 1.0]]))
    assert_close(
        asynchronous(x, W)[0], jnp.array([[-1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]])
    )


@examples(15)
@given(seed=SEED, hebbian=st.booleans(), biased=st.booleans())
def test_one_neuron_at_a_time_goes_downhill(x64, seed, hebbian, biased):
    rng = np.random.default_rng(seed)
    W = (
        np.asarray(hebb(jnp.asarray(spins(rng, 4, 7))))
        if hebbian
        else couplings(rng, 7)
    )
    b = rng.normal(size=7) * biased
    x = spins(rng, 2, 3, 7)
    order = rng.integers(0, 7, 20)
    end, energies = run_asynchronous(x, W, b, order)
    assert energies.shape == (21, 2, 3)
    assert_descends(energies, rtol=1e-12)
    for t, i in enumerate(order):  # and each energy is the energy of its state
        assert_close(
            energies[t], each(lambda s: ising(s, W, b), x), rtol=1e-11, atol=1e-11
        )
        h = x @ W[i] - b[i]
        x[..., i] = np.where(h == 0, x[..., i], np.sign(h))
    assert_close(end, x)
    assert_close(
        energies[-1], each(lambda s: ising(s, W, b), x), rtol=1e-11, atol=1e-11
    )


def test_energies_of_couplings_that_are_not_symmetric(x64):
    rng = np.random.default_rng(5)
    for W in (np.array([[0.0, 1.0], [-1.0, 0.0]]), rng.normal(size=(8, 8))):
        x, b = spins(rng, 3, len(W)), rng.normal(size=len(W))
        for order in np.split(rng.integers(0, len(W), 12), 12):
            end, energies = run_asynchronous(x, W, b, order)
            assert_close(
                energies,
                np.stack(
                    [each(lambda s: ising(s, W, b), y) for y in (x, np.asarray(end))]
                ),
                rtol=1e-11,
                atol=1e-11,
            )
            x = np.asarray(end)


def test_ties_make_no_longer_cycles(x64):
    # few patterns, whole numbers: many neurons without a field
    rng = np.random.default_rng(6)
    ties = 0
    for W in [hebb(jnp.asarray(spins(rng, 2, 6))) for _ in range(10)]:
        x = jnp.asarray(spins(rng, 64, 6))
        for _ in range(40):
            x = synchronous(x, W)
        ties += (x @ W == 0).sum()
        assert_close(synchronous(synchronous(x, W), W), x)
    assert ties > 0


@examples(10)
@given(seed=SEED)
def test_all_at_once_ends_in_a_point_or_a_two_cycle(x64, seed):
    rng = np.random.default_rng(seed)
    W, b, path = couplings(rng, 7), 0.3 * rng.normal(size=7), [spins(rng, 20, 7)]
    for _ in range(60):
        path.append(
            np.asarray(
                synchronous(jnp.asarray(path[-1]), jnp.asarray(W), jnp.asarray(b))
            )
        )
    path = np.stack(path)
    assert_descends(
        -np.sum(path[1:] @ W * path[:-1], -1) + (path[1:] + path[:-1]) @ b, rtol=1e-12
    )
    assert_close(path[-1], path[-3])


def test_settle_counts_the_steps_that_changed_something(x64):
    pair = jnp.array([[0.0, 1.0], [1.0, 0.0]])
    x = jnp.array([[1.0, 1.0], [1.0, -1.0]])
    end, steps = settle(lambda x: synchronous(x, pair), x, 30)
    assert steps.tolist() == [0, 30]  # at rest from the start; never
    assert_close(end, x)  # thirty is even: back where it began
    end, steps = settle(lambda x: asynchronous(x, pair)[0], x, 30)
    assert steps.tolist() == [0, 1] and end.tolist() == [[1, 1], [-1, -1]]
    assert settle(lambda x: -x, jnp.ones((2, 3, 4)), 1)[1].tolist() == [[1, 1, 1]] * 2


# ------------------------------------------------------------------------------------
# dense networks


@each_interaction
def test_dense_energy_is_the_formula(x64, F):
    rng = np.random.default_rng(2)
    x, xi = spins(rng, 2, 3, 6), spins(rng, 4, 6)
    E = each(lambda s: dense(s, xi, F), x)
    assert_close(dense_energy(jnp.asarray(x), jnp.asarray(xi), F), E, rtol=1e-12)


@each_interaction
@examples(6)
@given(seed=SEED)
def test_a_sweep_flips_what_pays_and_nothing_else(x64, F, seed):
    rng = np.random.default_rng(seed)
    # memories of real numbers: no ties
    x, xi, order = spins(rng, 2, 3, 6), rng.normal(size=(5, 6)), rng.integers(0, 6, 15)
    end, energies = run_sweep(x, xi, F=F, order=order)
    assert energies.shape == (16, 2, 3)
    assert_descends(energies, rtol=1e-12)
    for t, i in enumerate(order):
        E, other = (
            each(lambda s: dense(s, xi, F), y)
            for y in (x, np.where(np.arange(6) == i, -x, x))
        )
        assert_close(energies[t], E, rtol=1e-9, atol=1e-13)
        assert (abs(other - E) > 1e-12 * abs(E)).all()
        x[..., i] = np.where(other < E, -x[..., i], x[..., i])
    assert_close(end, x)
    assert_close(
        energies[-1], each(lambda s: dense(s, xi, F), x), rtol=1e-9, atol=1e-13
    )


def test_the_square_is_the_classical_network(x64):
    # D = 8: a power of two, so that undecided neurons are exactly that
    rng = np.random.default_rng(3)
    x = spins(rng, 2, 30, 8)
    xi = jnp.asarray(spins(rng, 4, 8))
    order = rng.integers(0, 8, 20)
    W = hebb(xi)
    assert_close(
        run_sweep(x, xi, F=Polynomial(2), order=order)[0],
        run_asynchronous(x, W, None, order)[0],
    )
    assert_close(
        dense_energy(jnp.asarray(x), xi, Polynomial(2)) * 64 / 2,
        ising_energy(jnp.asarray(x), hebb(xi, True)),
        rtol=1e-12,
    )


def test_any_interaction_goes(x64):
    rng = np.random.default_rng(4)
    rectified = lambda a, dim: jnp.maximum(a, 0) ** 3 / dim**3
    assert_descends(
        run_sweep(spins(rng, 20, 8), spins(rng, 6, 8), F=rectified)[1], rtol=1e-12
    )


@pytest.mark.parametrize("F", [Polynomial(10), Exponential()], ids=str)
def test_badly_damaged_patterns_are_recalled_in_single_precision(F):
    "Although the energies of all states around them round to zero."
    rng = np.random.default_rng(0)
    xi = jnp.asarray(spins(rng, 5, 512), jnp.float32)
    at = rng.random((5, 512)).argsort(-1).argsort(-1)
    damaged = jnp.where(at < 154, -xi, xi)
    end, sweeps = settle(lambda x: run_sweep(x, xi, F=F)[0], damaged)
    assert_close(end, xi)
    assert sweeps.max() < 100
    assert_close(dense_energy(xi, xi, F), -jnp.ones(5), rtol=1e-6)  # no overflow
    assert_descends(run_sweep(damaged, xi, F=F)[1])


# ------------------------------------------------------------------------------------
# continuous network


def setup(seed, K=5, D=4, lead=(2, 3), scale=1.3):
    rng = np.random.default_rng(seed)
    return jnp.asarray(2 * rng.normal(size=(*lead, D))), jnp.asarray(
        scale * rng.normal(size=(K, D))
    )


@each_beta
def test_continuous_energy_and_its_gradient(x64, beta):
    x, xi = setup(0)
    formula = lambda s: (
        sum(s * s) / 2 - log(sum(exp(beta * sum(m * s)) for m in np.asarray(xi))) / beta
    )
    E, u = _continuous_energy_and_update(x, xi, beta)
    assert_close(E, each(formula, np.asarray(x)), rtol=1e-12)
    assert_gradient(lambda x: _continuous_energy_and_update(x, xi, beta)[0], x, -u)
    # β is the length of the patterns
    unit, u1 = _continuous_energy_and_update(beta**0.5 * x, beta**0.5 * xi)
    assert_close(E, unit / beta, rtol=1e-12)
    assert_close(u, u1 / beta**0.5, rtol=1e-12)
    # memories have no order
    assert_close(_continuous_energy_and_update(x, xi[::-1], beta)[1], u, rtol=1e-12)


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
    E, u = _continuous_energy_and_update(x, xi, beta)
    assert_close(energies[0], E, rtol=1e-12)
    assert (
        energies[1] - E <= -alpha * (1 - alpha / 2) * jnp.sum(u**2, -1) + 1e-12
    ).all()
    once = run_retrieve(x, xi, beta, steps=1, step_size=alpha)[0]
    assert_close(
        once,
        (1 - alpha) * x + alpha * jax.nn.softmax(beta * x @ xi.T, -1) @ xi,
        rtol=1e-12,
    )
    assert_close(
        energies[-1], _continuous_energy_and_update(end, xi, beta)[0], rtol=1e-12
    )


@examples(8)
@given(seed=SEED)
def test_two_limits_of_the_fixed_points(x64, seed):
    x, xi = setup(seed, K=6, D=9, lead=(12,))
    R = float(jnp.linalg.norm(xi - xi.mean(0)[None], axis=-1).max())
    ends = run_retrieve(5 * x, xi, 0.9 / R**2, steps=400)[0]
    # hot: one, a mean of all
    assert_close(ends, jnp.broadcast_to(ends[:1], ends.shape), rtol=1e-8)
    overlaps = xi @ xi.T
    stands_out = jnp.diag(overlaps) - (overlaps - 1e9 * jnp.eye(6)).max(1)
    beta = 20.0
    moved = jnp.linalg.norm(run_retrieve(xi, xi, beta, steps=1)[0] - xi, axis=-1)
    far = jnp.linalg.norm(xi[:, None] - xi[None], axis=-1).max()
    # cold: each memory that stands out
    assert (moved <= 5 * jnp.exp(-beta * stands_out) * far + 1e-12).all()
    mu = int(stands_out.argmax())
    r = float(stands_out[mu] / (2 * far))
    # just cold enough: the ball goes into itself
    beta = 2 / float(stands_out[mu]) * log(5 * float(far) / r)
    away = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    for steps in (1, 400):
        end = run_retrieve(xi[mu][None] + r * away, xi, beta, steps=steps)[0]
        assert (jnp.linalg.norm(end - xi[mu][None], axis=-1) <= r * (1 + 1e-9)).all()


def test_sharing_counts_memories(x64):
    x, xi = setup(0)
    assert_close(_sharing(x, jnp.ones((5, 4)), 2.0), 5 * jnp.ones((2, 3)), rtol=1e-12)
    assert_close(_sharing(x, xi, 1e6), jnp.ones((2, 3)), rtol=1e-9)
    p = jax.nn.softmax(0.7 * x @ xi.T, -1)
    assert_close(_sharing(x, xi, 0.7), 1 / (p**2).sum(-1), rtol=1e-12)


def test_huge_scores_stay_finite():
    x = 1e4 * jnp.ones((2, 3))
    xi = jnp.array([[1.0, 1, 1], [-1.0, 1, 1]])
    E, u = _continuous_energy_and_update(x, xi, 50.0)
    assert (
        jnp.isfinite(E).all()
        and jnp.isfinite(u).all()
        and jnp.isfinite(_sharing(x, xi, 50.0)).all()
    )
    assert E.dtype == u.dtype == jnp.float32


def test_unit_memories(x64):
    pictures = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2, 3, 2)) + 4)
    xi, mean = _unit_memories(pictures)
    assert_close(jnp.linalg.norm(xi, axis=-1), jnp.ones(5), rtol=1e-12)
    assert_close(mean, pictures.reshape(5, 12).mean(0), rtol=1e-12)
    centered = pictures.reshape(5, 12) - mean[None]
    # parallel
    assert_close(
        jnp.sum(xi * centered, -1), jnp.linalg.norm(centered, axis=-1), rtol=1e-12
    )


# ------------------------------------------------------------------------------------
# exact likelihood


@each_beta
@pytest.mark.parametrize("D, points", [(1, 300), (2, 150), (3, 60)])
def test_partition_function_is_the_integral(x64, D, points, beta):
    xi = 0.8 * np.random.default_rng(D).normal(size=(3, D))
    axis = np.linspace(-3.5 - 6 / beta**0.5, 3.5 + 6 / beta**0.5, points)
    x = jnp.asarray(
        np.stack(np.meshgrid(*[axis] * D, indexing="ij"), -1).reshape(-1, D)
    )
    integral = (
        jnp.sum(
            jnp.exp(-beta * _continuous_energy_and_update(x, jnp.asarray(xi), beta)[0])
        )
        * (axis[1] - axis[0]) ** D
    )
    assert_close(_log_partition(jnp.asarray(xi), beta), jnp.log(integral), rtol=1e-6)


@each_beta
def test_likelihood_is_that_of_a_mixture_and_its_gradient_by_hand(x64, beta):
    x, xi = setup(1, lead=(7,))
    w = jax.nn.softmax(beta * (xi**2).sum(-1) / 2)
    density = (
        jnp.exp(-beta / 2 * ((x[:, None] - xi[None]) ** 2).sum(-1))
        @ w
        * (beta / 2 / jnp.pi) ** 2
    )
    assert_close(
        negative_log_likelihood(x, xi, beta), -jnp.log(density).mean(), rtol=1e-12
    )
    p = jax.nn.softmax(beta * x @ xi.T, -1)
    by_hand = beta * (w[:, None] * xi - p.T @ x / len(x))
    assert_gradient(lambda xi: negative_log_likelihood(x, xi, beta), xi, by_hand)
    learned, losses = learn(x, xi, beta, steps=1, step_size=0.03)
    assert_close(learned, xi - 0.03 * by_hand, rtol=1e-12)
    assert_close(losses[1], negative_log_likelihood(x, learned, beta), rtol=1e-12)


@examples(8)
@given(seed=SEED, beta=st.sampled_from([*BETAS, 20.0]))
def test_default_step_goes_downhill(x64, seed, beta):
    x, xi = setup(seed, K=4, lead=(15,))
    assert_descends(run_learn(x, xi, beta=beta, steps=300)[1])
    R2 = float((xi**2).sum(-1).max())
    assert_close(
        learn(x, xi, beta, 1)[0],
        learn(x, xi, beta, 1, 1 / (beta + beta**2 * R2 / 2))[0],
        rtol=1e-12,
    )


def test_samples_follow_the_distribution(x64):
    xi, beta = jnp.asarray([[1.0, 0.0], [0.0, 1.5], [-0.5, -0.5]]), 2.0
    x = sample(jax.random.key(0), xi, 40_000, beta)
    w = jax.nn.softmax(beta * (xi**2).sum(-1) / 2)
    assert x.shape == (40_000, 2)
    assert_close(x.mean(0), w @ xi, atol=0.02, rtol=0)
    second = jnp.einsum("k,ki,kj->ij", w, xi, xi) + jnp.eye(2) / beta
    assert_close(x.T @ x / len(x), second, atol=0.03, rtol=0)
    # what was drawn is as likely as the model says: the mean of its score is zero, the
    # entropy two ways
    score = _continuous_energy_and_update(x, xi, beta)[1]
    assert_close(score.mean(0), jnp.zeros(2), atol=0.02, rtol=0)


# ------------------------------------------------------------------------------------
# attention


def weights(seed, H=3, D=6, Y=2):
    return jnp.asarray(0.6 * np.random.default_rng(seed).normal(size=(3, H, D, Y)))


@pytest.mark.parametrize("beta", [None, 0.3, 2.0])
def test_attention_by_index(x64, beta):
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(2, n, 6)) for n in (3, 5))
    Wq, Wk, Wv = np.asarray(weights(1))
    b = 2**-0.5 if beta is None else beta
    expected = np.zeros((2, 3, 3, 2))
    for s, h, n in np.ndindex(2, 3, 3):
        e = [exp(b * sum((x[s, n] @ Wq[h]) * (y[s, m] @ Wk[h]))) for m in range(5)]
        expected[s, h, n] = sum(e[m] / sum(e) * (y[s, m] @ Wv[h]) for m in range(5))
    assert_close(
        hopfield_attention(*map(jnp.asarray, (x, y)), *weights(1), beta),
        expected,
        rtol=1e-12,
    )


def test_attention_is_the_layer_of_flax_and_a_step_of_retrieval(x64):
    rng = np.random.default_rng(1)
    x, y = (jnp.asarray(rng.normal(size=(2, n, 12))) for n in (3, 5))
    layer = nnx.MultiHeadAttention(
        3, 12, use_bias=False, decode=False, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    )
    Wq, Wk, Wv = (
        jnp.swapaxes(part.kernel[...], 0, 1)
        for part in (layer.query, layer.key, layer.value)
    )
    out = lambda heads: jnp.einsum("bhny,hyd->bnd", heads, layer.out.kernel[...])
    # inside flax
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        across, within = layer(x, y), layer(x)
    # its softmax is in single precision
    assert_close(out(hopfield_attention(x, y, Wq, Wk, Wv)), across, rtol=1e-6)
    assert_close(out(hopfield_attention(x, x, Wq, Wk, Wv)), within, rtol=1e-6)
    Q, K = (jnp.einsum("bnd,hdy->bhny", tokens, W) for tokens, W in ((x, Wq), (y, Wk)))
    for s, h in np.ndindex(2, 3):
        assert_close(
            hopfield_attention(x, y, Wq, Wk, Wk)[s, h],
            retrieve(Q[s, h], K[s, h], 0.5, 1)[0],
            rtol=1e-12,
        )


# ------------------------------------------------------------------------------------
# real data


def test_real_pictures_are_recalled_from_noise(et_data):
    from et_nbdev.vision.data import load_images

    images = load_images("cifar10", "test", data_dir=et_data)
    xi, _ = _unit_memories(jnp.asarray(images[np.arange(64)] / np.float32(255)))
    noisy = xi + 0.5 / xi.shape[1] ** 0.5 * jax.random.normal(
        jax.random.key(0), xi.shape
    )
    assert_close(retrieve(noisy, xi, 1000.0, 5)[0], xi, atol=1e-3)
    ends = retrieve(noisy, xi, 0.5, 50)[0]
    assert (
        _sharing(ends, xi, 0.5).min() > 60
        and jnp.linalg.norm(ends, axis=-1).max() < 0.1
    )


def test_kept_numbers_say_where_they_come_from():
    kept = json.loads(
        (
            Path(__file__).resolve().parent.parent / "results/hopfield/cifar10.json"
        ).read_text()
    )
    assert {
        "commit",
        "device",
        "jax",
        "date",
        "seconds",
        "seed",
        "data",
        "stored",
        "queries",
    } <= set(kept)
    assert not kept["commit"].endswith("+") and max(kept["furthest_from_rest"]) <= 1e-5
    assert len(kept["betas"]) == len(kept["sharing"]) == len(kept["recalled"])


def test_the_script_refuses_fewer_queries_than_it_shows(monkeypatch, capsys):
    script = runpy.run_path(
        str(Path(__file__).resolve().parent.parent / "experiments/hopfield_cifar.py")
    )
    for arguments in (["--queries", "7"], ["--stored", "9", "--queries", "10"]):
        monkeypatch.setattr("sys.argv", ["hopfield_cifar.py", *arguments])
        with pytest.raises(SystemExit):
            script["main"]()
        assert "--queries: expected at least 8" in capsys.readouterr().err


# ------------------------------------------------------------------------------------
# arrays as numbers


def test_numbers_may_be_jax_arrays():
    x = jnp.ones((3, 4))
    xi = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4)), jnp.float32)
    expected = retrieve(x, xi, 2.0, 3, 0.5)[0]
    for two, half in (
        (jnp.array(2.0), jnp.array(0.5)),
        (jnp.float32(2), np.float32(0.5)),
        (jnp.array(2), jnp.bfloat16(0.5)),
    ):
        assert_close(retrieve(x, xi, two, 3, half)[0], expected, rtol=1e-6)
        assert_close(
            jax.jit(lambda x: retrieve(x, xi, two, 3, half)[0])(x), expected, rtol=1e-6
        )
        assert_close(
            learn(x, xi, two, 3, half)[0], learn(x, xi, 2.0, 3, 0.5)[0], rtol=1e-6
        )
    assert_close(
        jax.jit(lambda b: retrieve(x, xi, b, 3, 0.5)[0])(2.0), expected, rtol=1e-6
    )


def test_an_order_may_be_a_jax_array_and_may_be_empty():
    x, xi, order = jnp.ones(4).at[0].set(-1), jnp.ones((2, 4)), jnp.array([0, 2])
    W = hebb(xi)
    assert_close(
        settle(lambda x: asynchronous(x, W, order=order)[0], x)[0], jnp.ones(4)
    )
    assert_close(
        settle(lambda x: _dense_sweep(x, xi, Exponential(), order)[0], x)[0],
        jnp.ones(4),
    )
    assert_close(
        jax.jit(lambda x, i: asynchronous(x, W, order=[i, 2])[0])(x, 0), jnp.ones(4)
    )
    assert_close(asynchronous(x, W, order=[])[0], x)
    assert asynchronous(x, W, order=[])[1].shape == (1,)


# ------------------------------------------------------------------------------------
# bad input

half, nans = (lambda a: a.astype(jnp.float16)), jnp.full((2, 4), jnp.nan)
xs, xis, W4, six = (
    jnp.ones((3, 4)),
    jnp.ones((2, 4)),
    jnp.ones((4, 4)),
    jnp.ones((2, 6)),
)
heads = jnp.ones((3, 1, 6, 2))
SQUARE = Polynomial(2)
BAD = [
    (lambda: hebb(jnp.ones(4)), r"xi: expected the shape \(K, D\), got \(4,\)"),
    (lambda: hebb(jnp.ones((0, 4))), "xi: expected the shape"),
    (lambda: hebb(np.ones((2, 4), int)), "xi: expected an array of floating.*int64"),
    (lambda: hebb([1.0]), "xi: expected an array of floating.*list"),
    (lambda: hebb(nans), "xi: expected finite"),
    (lambda: ising_energy(xs, jnp.ones((4, 3))), r"W: .* \(D, D\).*got \(4, 3\)"),
    (
        lambda: ising_energy(0.5 * xs, W4),
        "x: expected entries of -1 and 1 only, got 0.5",
    ),
    (lambda: ising_energy(jnp.ones((2, 3)), W4), r"x: .*\(..., D\) with D = 4, got"),
    (lambda: ising_energy(jnp.float32(1), W4), "x: .* with D = 4"),
    (lambda: ising_energy(xs, W4, nans[0]), "b: expected finite"),
    (lambda: synchronous(half(xs), W4), "x: expected an array of float32.*got float16"),
    (lambda: synchronous(xs, W4, jnp.ones(3)), r"b: .*\(D\) with D = 4, got \(3,\)"),
    (lambda: asynchronous(xs, W4, order=[0, 4]), "order: .* from 0 to D - 1 = 3"),
    (lambda: asynchronous(xs, W4, order=[[0]]), "order: expected a list"),
    (lambda: asynchronous(xs, W4, order=[0.5]), "order: expected a list"),
    (lambda: settle(lambda x: x, xs, 0), "most: expected"),
    (lambda: Polynomial(1), "n: expected a whole number of at least 2, got 1"),
    (lambda: dense_energy(jnp.ones(3), xis, SQUARE), "x: .*D = 4"),
    (lambda: _dense_sweep(0 * xs, xis, SQUARE), "-1 and 1"),
    (lambda: _dense_sweep(xs, xis, SQUARE, [-1]), "order: "),
    (lambda: retrieve(xs, jnp.ones((2, 5))), "x: .*D = 5"),
    (lambda: retrieve(half(xs), xis), "x: expected an array of float32.*got float16"),
    (lambda: retrieve(xs, xis, [1.0, 2.0]), "beta: expected"),
    (
        lambda: retrieve(xs, xis, 0.0),
        "beta: expected a positive, finite number, got 0.0",
    ),
    (lambda: retrieve(xs, xis, steps=-1), "steps: expected"),
    (lambda: retrieve(xs, xis, step_size=-1.0), "step_size: expected"),
    (lambda: _sharing(jnp.ones(3), xis), "x: .*D = 4"),
    (lambda: _sharing(xs, xis, np.inf), "beta: expected"),
    (
        lambda: _unit_memories(jnp.array([[1.0, 0], [0, 1], [0.5, 0.5]])),
        "number 2 equals",
    ),
    (lambda: sample(jax.random.key(0), xis, 0), "num: expected"),
    (lambda: negative_log_likelihood(xs[0], xis), r"x: .*\(B, D\).*\(4,\)"),
    (lambda: negative_log_likelihood(xs[:0], xis), r"x: .*\(0, 4\)"),
    (lambda: learn(xs, xis, step_size=0.0), "step_size: expected"),
    (lambda: learn(xs, xis, steps=1.5), "steps: expected"),
    (lambda: hopfield_attention(six, six, *heads.astype(int)), "Wq: .*floating"),
    (lambda: hopfield_attention(jnp.ones((2, 5)), six, *heads), "x: .*D = 6"),
    (lambda: hopfield_attention(six, jnp.ones((2, 5)), *heads), "y: .*D = 6"),
    (lambda: hopfield_attention(six[None], six, *heads), "y: expected the batch axes"),
    (lambda: hopfield_attention(six, six, *heads, beta=-1.0), "beta: "),
]


@pytest.mark.parametrize("call, says", BAD)
def test_bad_input_is_refused_by_name(call, says):
    with pytest.raises((TypeError, ValueError), match=says):
        call()
