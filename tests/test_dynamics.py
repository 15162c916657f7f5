"""The descent: one scan, equal to the loop it stands for, and the ways in which its
energy falls or, knowingly, does not.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import examples
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from et_nbdev.block import EnergyTransformer
from et_nbdev.dynamics import Euler, descend
from et_nbdev.norm import EnergyLayerNorm, layer_norm, turning
from et_nbdev.solvers import Anderson, solve
from et_nbdev.testing import assert_close, assert_descends

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("compile_quickly")]


def block_of(rng, D=6, H=2, Y=3, K=8, gamma=1.7, scale=0.5, **options):
    "A block with random float64 weights, γ and δ, from NumPy: nothing is compiled."
    graphdef, state = nnx.split(
        nnx.eval_shape(
            lambda: EnergyTransformer(
                D, H, Y, K, param_dtype=jnp.float64, rngs=nnx.Rngs(0), **options
            )
        )
    )
    block = nnx.merge(
        graphdef,
        jax.tree.map(lambda w: jnp.asarray(scale * rng.normal(size=w.shape)), state),
    )
    block.norm.rho[...] = jnp.asarray(np.log(np.expm1(gamma)))
    return block


@partial(
    jax.jit, static_argnums=0, static_argnames=("steps", "states", "remat", "unroll")
)
def _run(graphdef, state, x, **options):
    return descend(nnx.merge(graphdef, state), x, **options)


def run(block, x, **options):
    return jax.device_get(_run(*nnx.split(block), x, **options))


def loop(block, x, steps=12, step_size=0.1, **context):
    """What `descend` stands for: a Python loop over the block's public parts. Energies
    apart, each (T+1, ...), and all states.
    """
    energies, states = [], []
    for t in range(steps + 1):
        g = block.norm(x)
        energies.append((block.attention.energy(g, **context), block.memory.energy(g)))
        states.append(x)
        if t < steps:
            x = x + step_size * (
                block.attention.update(g, **context) + block.memory.update(g)
            )
    return x, [jnp.stack(e) for e in zip(*energies)], jnp.stack(states)


# ------------------------------------------------------------------------------------
# the scan is the loop

VARIANTS = [dict(), dict(unroll=True), dict(remat=True, unroll=2)]


@examples(2)
@given(
    seed=st.integers(0, 2**16),
    lead=st.sampled_from([(2,), (2, 2)]),
    steps=st.sampled_from([3, 1, 4]),
    step_size=st.sampled_from([0.02, 0.3]),
    mask=st.sampled_from(["per sample", None, "shared"]),
    activation=st.sampled_from(["relu", "power", "softmax"]),
    learn_beta=st.booleans(),
)
def test_scan_rematerialized_and_unrolled_are_the_loop_in_values_and_gradients(
    x64, seed, lead, steps, step_size, mask, activation, learn_beta
):
    rng = np.random.default_rng(seed)
    block = block_of(rng, activation=activation, learn_beta=learn_beta)
    graphdef, state = nnx.split(block)
    x = rng.normal(size=(*lead, 4, 6))
    context = {}
    if mask:
        shape = (4, 4) if mask == "shared" else (*lead, 4, 4)
        context = {"mask": rng.random(shape) < 0.6}
    # a loss of the last state and of every energy on the way
    v, w = rng.normal(size=x.shape), rng.normal(size=(2, steps + 1, *lead))

    def by_loop(state, x):
        last, (attention, memory), states = loop(
            nnx.merge(graphdef, state), x, steps, step_size, **context
        )
        return jnp.vdot(v, last) + jnp.vdot(w[0], attention) + jnp.vdot(w[1], memory), (
            last,
            attention,
            memory,
            states,
        )

    def by_scan(state, x, **variant):
        last, path = descend(
            nnx.merge(graphdef, state),
            x,
            steps,
            step_size,
            states=True,
            **variant,
            **context,
        )
        attention, memory = path.energies.values()
        return jnp.vdot(v, last) + jnp.vdot(w[0], attention) + jnp.vdot(w[1], memory), (
            last,
            attention,
            memory,
            path.states,
        )

    together = lambda f: jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(state, x)
    expected = together(by_loop)
    assert len(jax.tree.leaves(expected[1][0])) == 5 + learn_beta and all(
        np.any(leaf) for leaf in jax.tree.leaves(expected[1])
    )
    for variant in VARIANTS:
        for (_, a), b in zip(
            jax.tree.leaves_with_path(together(partial(by_scan, **variant))),
            jax.tree.leaves(expected),
            strict=True,
        ):
            # a derivative may cancel down to rounding, so not of its own size alone
            assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_without_jit_it_is_the_same(x64):
    rng = np.random.default_rng(0)
    block, x = block_of(rng), rng.normal(size=(2, 4, 6))
    last, path = descend(block, jnp.asarray(x), steps=3)
    compiled, compiled_path = run(block, x, steps=3)
    assert_close(last, compiled, rtol=1e-12)
    assert_close(path.energies.total, compiled_path.energies.total, rtol=1e-12)


def test_a_trajectory_has_both_ends(x64):
    rng = np.random.default_rng(0)
    block, x = block_of(rng), rng.normal(size=(2, 2, 4, 6))
    for steps in (0, 3):
        last, path = run(block, x, steps=steps, states=True)
        attention, memory = path.energies["attention"], path.energies["memory"]
        assert (
            attention.shape
            == memory.shape
            == path.energies.total.shape
            == (steps + 1, 2, 2)
        )
        assert path.states.shape == (steps + 1, *x.shape)
        np.testing.assert_array_equal(path.states[0], x)
        np.testing.assert_array_equal(path.states[-1], last)
        np.testing.assert_array_equal(path.energies.total, attention + memory)
        for t, state in ((0, x), (-1, last)):
            energies = jax.jit(lambda x: block.energies(block.norm(x)))(state)
            assert_close(attention[t], energies["attention"], rtol=1e-12)
            assert_close(memory[t], energies["memory"], rtol=1e-12)
        without = run(block, x, steps=steps)
        assert without[1].states is None
        assert_close(without[0], last, rtol=1e-12)
    np.testing.assert_array_equal(run(block, x, steps=0)[0], x)


@pytest.mark.parametrize("unroll", [1, True])
@pytest.mark.parametrize("remat", [False, True])
def test_no_steps_at_all_under_every_option(x64, remat, unroll):
    rng = np.random.default_rng(0)
    block, x = block_of(rng), rng.normal(size=(2, 4, 6))
    last, path = run(block, x, steps=0, remat=remat, unroll=unroll, states=True)
    np.testing.assert_array_equal(last, x)
    assert path.states.shape == (1, 2, 4, 6) and path.energies.total.shape == (1, 2)


def test_defaults_are_the_papers_twelve_steps_of_a_tenth(x64):
    rng = np.random.default_rng(0)
    block, x = block_of(rng), rng.normal(size=(2, 4, 6))
    assert_close(
        run(block, x)[0], jax.jit(lambda x: loop(block, x, 12, 0.1)[0])(x), rtol=1e-12
    )


def test_two_descents_in_a_row_are_one(x64):
    rng = np.random.default_rng(0)
    block, x = block_of(rng), rng.normal(size=(2, 4, 6))
    half, first = run(block, x, steps=3)
    last, second = run(block, half, steps=3)
    whole, path = run(block, x, steps=6)
    assert_close(last, whole, rtol=1e-12)
    assert_close(
        np.concatenate([first.energies.total, second.energies.total[1:]]),
        path.energies.total,
        rtol=1e-12,
    )


@pytest.mark.parametrize(
    "tokens, options",
    [(jnp.float32, {}), (jnp.bfloat16, {}), (jnp.float32, dict(dtype=jnp.bfloat16))],
    ids=str,
)
def test_tokens_keep_their_dtype_and_energies_are_single(tokens, options):
    block = EnergyTransformer(8, 2, 4, 16, rngs=nnx.Rngs(0), **options)
    x = jax.random.normal(jax.random.key(0), (2, 3, 8)).astype(tokens)
    last, path = run(block, x, steps=3, states=True)
    assert (
        last.dtype == path.states.dtype == tokens
        and path.energies.total.dtype == jnp.float32
    )
    reference = run(
        EnergyTransformer(8, 2, 4, 16, rngs=nnx.Rngs(0)), x.astype(jnp.float32), steps=3
    )
    assert_close(last.astype(np.float32), reference[0], rtol=2e-2)
    assert_close(path.energies.total, reference[1].energies.total, rtol=2e-2)


# ------------------------------------------------------------------------------------
# nothing is done twice


def test_one_trace_for_any_number_of_steps_and_for_each_shape(x64, monkeypatch):
    "Counts how often Python passes through: under jit, how often it is traced."
    calls, whole = [], EnergyTransformer.energies_and_update

    def counted(self, g, **context):
        calls.append(None)
        return whole(self, g, **context)

    monkeypatch.setattr(EnergyTransformer, "energies_and_update", counted)
    rng = np.random.default_rng(0)
    block = block_of(rng)
    for shape in ((2, 4, 6), (3, 4, 6)):
        for steps in (1, 50):
            calls.clear()
            for _ in range(3):  # other numbers, the same program
                run(block, rng.normal(size=shape), steps=steps)
                block.memory.xi[...] = jnp.asarray(rng.normal(size=(8, 6)))
            # the scan's body, however long it is, and the energy of the last state
            assert len(calls) == 2


def test_a_traced_step_size_needs_no_second_program(x64):
    rng = np.random.default_rng(0)
    block, x, traces = block_of(rng), rng.normal(size=(2, 4, 6)), []

    @jax.jit
    def end(x, step_size):
        traces.append(None)
        return descend(block, x, 3, step_size)[0]

    for step_size in (0.01, 0.1):
        assert_close(
            end(x, step_size),
            run(block, x, steps=3, step_size=step_size)[0],
            rtol=1e-12,
        )
    assert len(traces) == 1


def test_nothing_is_computed_for_energies_that_nobody_reads(x64):
    rng = np.random.default_rng(0)
    block, x = block_of(rng), jnp.asarray(rng.normal(size=(2, 4, 6)))
    logs = lambda f: jax.jit(f).lower(x).compile().as_text().count(" log(")
    assert logs(lambda x: descend(block, x, 3)[1].energies.total) > 0
    # the logarithm stands in Eq. (3) and in no update
    assert logs(lambda x: descend(block, x, 3)[0]) == 0


def test_rematerialization_stores_less_and_unrolling_leaves_no_loop(x64):
    rng = np.random.default_rng(0)
    block, x = block_of(rng, K=64), jnp.asarray(rng.normal(size=(2, 4, 6)))
    forward = lambda **options: lambda x: descend(block, x, 10, **options)[0]
    backward = lambda **options: jax.eval_shape(
        lambda x: jax.vjp(forward(**options), x)[1], x
    )
    stored = lambda **options: sum(
        leaf.size for leaf in jax.tree.leaves(backward(**options))
    )
    assert stored(remat=True) < stored() / 4
    loops = lambda **options: (
        jax.jit(forward(**options)).lower(x).as_text().count("stablehlo.while")
    )
    assert loops() == 1 and loops(unroll=True) == 0


# ------------------------------------------------------------------------------------
# every sample alone


@pytest.mark.parametrize("mask", [None, "per sample"])
def test_a_sample_descends_as_if_it_were_alone(x64, mask):
    rng = np.random.default_rng(0)
    block, x = block_of(rng), rng.normal(size=(3, 4, 6))
    context = {"mask": rng.random((3, 4, 4)) < 0.6} if mask else {}
    last, path = run(block, x, states=True, **context)
    for b in range(3):
        alone = {name: a[b] for name, a in context.items()}
        own, own_path = run(block, x[b], states=True, **alone)
        assert_close(own, last[b], rtol=1e-12)
        assert_close(own_path.energies.total, path.energies.total[:, b], rtol=1e-12)
    other = x.copy()
    other[0] = 100.0
    after, after_path = run(block, other, states=True, **context)
    np.testing.assert_array_equal(after[1:], last[1:])
    np.testing.assert_array_equal(
        after_path.energies.total[:, 1:], path.energies.total[:, 1:]
    )


def test_the_descent_knows_no_order_of_tokens(x64):
    rng = np.random.default_rng(0)
    block = block_of(rng)
    x = rng.normal(size=(2, 4, 6))
    mask = rng.random((4, 4)) < 0.6
    p = rng.permutation(4)
    last, path = run(block, x, mask=mask)
    last_p, path_p = run(block, x[:, p], mask=mask[p][:, p])
    assert_close(last_p, last[:, p], rtol=1e-12)
    assert_close(path_p.energies.total, path.energies.total, rtol=1e-12)


# ------------------------------------------------------------------------------------
# down, and when not


@examples(12)
@given(
    seed=st.integers(0, 2**16),
    step_size=st.sampled_from([1e-3, 0.01, 0.05]),
    gamma=st.sampled_from([0.3, 1.0, 2.0]),
    masked=st.booleans(),
    activation=st.sampled_from(["relu", "power", "gelu", "softmax"]),
)
def test_energy_falls_at_small_steps(x64, seed, step_size, gamma, masked, activation):
    rng = np.random.default_rng(seed)
    block = block_of(rng, gamma=gamma, scale=0.4, activation=activation)
    # always an array: one program for all
    mask = rng.random((4, 5, 5)) < (0.6 if masked else 1.1)
    _, path = run(
        block, 2 * rng.normal(size=(4, 5, 6)), steps=30, step_size=step_size, mask=mask
    )
    assert_descends(path.energies.total)
    assert (path.energies.total[-1] < path.energies.total[0]).all()


@examples(8)
@given(
    seed=st.integers(0, 2**16),
    step_size=st.sampled_from([0.1, 10.0, 1e4]),
    activation=st.sampled_from(["relu", "power", "softmax"]),
)
def test_the_memory_falls_at_steps_of_any_size(x64, seed, step_size, activation):
    """E_HN of these activations is concave in g, so E(g′) − E(g) ≤ −u·(g′ − g) with
    u = −∂E/∂g; and g is the gradient of a convex L, so u·(g′ − g) ≥ 0 for x′ = x + αu,
    whatever α. Only attention can overshoot.
    """
    rng = np.random.default_rng(seed)
    block = block_of(rng, activation=activation)
    block.attention.Wq[...] = block.attention.Wk[...] = jnp.zeros((2, 6, 3))
    _, path = run(block, rng.normal(size=(4, 5, 6)), steps=30, step_size=step_size)
    assert_descends(path.energies.total)
    # no weights, no attention: a constant
    assert np.ptp(path.energies["attention"], 0).max() < 1e-12


class ForcedGamma(EnergyLayerNorm):
    """A norm whose γ is what the test says, as in an implementation that lets γ go
    anywhere.
    """

    forced = 1.0

    def __call__(self, x):
        return layer_norm(
            x, jnp.asarray(self.forced, x.dtype), self.delta[...], self.eps
        )


def trajectory_with_gamma(gamma):
    rng = np.random.default_rng(0)
    block = block_of(rng)
    delta = block.norm.delta[...]
    block.norm = type("Norm", (ForcedGamma,), dict(forced=gamma))(
        6, param_dtype=jnp.float64
    )
    block.norm.delta[...] = delta
    return run(block, rng.normal(size=(4, 5, 6)), steps=30, step_size=0.01)[
        1
    ].energies.total


def test_a_negative_gamma_makes_the_energy_rise(x64):
    assert_descends(trajectory_with_gamma(0.8))
    rising = trajectory_with_gamma(-0.8)
    with pytest.raises(AssertionError, match="energy rises"):
        assert_descends(rising)
    # not a wobble: all the way up, in every sample
    assert (rising[-1] > rising[0]).all()
    assert_descends(trajectory_with_gamma(0.0))  # on the edge, g = δ and nothing moves


def repelling_pair():
    """Two equal tokens of one number ±s each, K = −Q: E = 2·g_A·g_B, least where they
    are opposite. ε = 1 keeps the norm soft around 0.
    """
    block = EnergyTransformer(
        2, 1, 1, 1, beta=1.0, eps=1.0, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    )
    block.norm.delta[...] = jnp.zeros(2)
    block.attention.Wq[...] = jnp.array([[[1.0], [0.0]]])
    block.attention.Wk[...] = jnp.array([[[-1.0], [0.0]]])
    block.memory.xi[...] = jnp.zeros((1, 2))
    return block, 0.1 * np.array([[1.0, -1.0], [1.0, -1.0]])


def test_a_step_too_large_makes_the_energy_rise(x64):
    """Equation (7) holds in continuous time. Both tokens step over the valley at once,
    and land higher on its other side.
    """
    block, x = repelling_pair()
    assert_descends(run(block, x, steps=30, step_size=0.05)[1].energies.total)
    energy = run(block, x, steps=1, step_size=10.0)[1].energies.total
    with pytest.raises(AssertionError, match="energy rises"):
        assert_descends(energy)
    # g of the start, so E = 2 s², and each moves by −2 α s in its first entry
    s = 0.1 / np.sqrt(1.01)
    np.testing.assert_allclose(energy[0], 2 * s**2, rtol=1e-9)
    spread = (0.2 - 20 * s) / 2
    np.testing.assert_allclose(energy[1], 2 * spread**2 / (spread**2 + 1), rtol=1e-9)
    assert energy[1] > 10 * energy[0]


def turning_share(block, x):
    "The part of the force that can turn the tokens, as a share of the force."
    u = block.update(block.norm(x))
    return float(jnp.linalg.norm(turning(x, u)) / jnp.linalg.norm(u))


def test_states_run_away_while_normalized_tokens_settle(x64):
    """From where g is at rest and the forces point outwards, x grows by the same amount
    in every step, and g stays.
    """
    rng = np.random.default_rng(0)
    block, x = block_of(rng, D=8, K=16), jnp.asarray(rng.normal(size=(3, 5, 8)))
    rest = solve(block, x, Anderson(), evaluations=2000, tolerance=1e-7)
    assert rest.settled.all() and turning_share(block, rest.x) < 1e-7
    _, path = run(block, rest.x, steps=200, step_size=0.1, states=True)
    assert_descends(path.energies.total)
    centered = path.states - path.states.mean(-1, keepdims=True)
    u = np.asarray(block.update(block.norm(jnp.asarray(path.states[0]))))
    assert ((centered[0] * u).sum(-1) > 0).all()
    growth = np.diff(np.linalg.norm(centered, axis=-1), axis=0)
    assert (growth > 0).all()
    np.testing.assert_allclose(growth, np.broadcast_to(growth[0], growth.shape), 1e-4)
    g = np.asarray(block.norm(jnp.asarray(path.states)))
    assert np.abs(g - g[0]).max() < 1e-5
    np.testing.assert_allclose(path.energies.total[-1], path.energies.total[0], 1e-9)


def test_small_steps_of_g_do_not_mean_rest(x64):
    """Steps of g shrink because x grows. After 500 of them the turning force is still
    there, and the energy at rest is lower, for one of the samples by a good deal.
    """
    rng = np.random.default_rng(0)
    block, x = block_of(rng, D=8, K=16), jnp.asarray(rng.normal(size=(3, 5, 8)))
    _, path = run(block, x, steps=500, step_size=0.1, states=True)
    assert_descends(path.energies.total)
    g = np.asarray(block.norm(jnp.asarray(path.states)))
    moved = np.linalg.norm(np.diff(g, axis=0), axis=-1).mean((1, 2))
    assert moved[-1] < 2e-3 * moved[0]
    shares = [turning_share(block, jnp.asarray(path.states[t])) for t in (0, 500)]
    assert shares[1] > 0.03 * shares[0]  # fifteen times that, and more
    rest = solve(block, x, Anderson(), evaluations=2000, tolerance=1e-7)
    lower = path.energies.total[-1] - rest.energies.total[-1]
    assert (lower > 0.5).all() and lower.max() > 50


def lone_token(lam, rng):
    "One token that attends to itself with opposite keys: E = λ|g|², u = −2λg."
    block = EnergyTransformer(
        4, 1, 4, 0, self_attention=True, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    )
    block.attention.Wq[...] = jnp.sqrt(lam) * jnp.eye(4)[None]
    block.attention.Wk[...] = -block.attention.Wq[...]
    return block, jnp.asarray(rng.normal(size=(10, 1, 4)))


@pytest.mark.parametrize("share, rises", [(0.99, False), (1.5, True)])
def test_a_token_that_shrinks_raises_the_energy_above_a_bound(x64, share, rises):
    "No rise if αλγ ≤ √ε; a rise, from every start, if αλγ > √(2ε)."
    block, x = lone_token(2.0, np.random.default_rng(0))
    g = block.norm(x)
    np.testing.assert_allclose(block.energy(g), 2.0 * (g**2).sum((-2, -1)), rtol=1e-9)
    np.testing.assert_allclose(block.update(g), -4.0 * g, rtol=1e-9)
    alpha = share * block.norm.eps**0.5 / (2.0 * float(block.norm.gamma))
    end, path = run(block, x, steps=3000, step_size=alpha, states=True)
    rose = (np.diff(path.energies.total, axis=0) > 1e-9).any(0)
    assert rose.all() if rises else not rose.any()
    size = np.asarray(path.states).std(-1)
    assert (size[-1] < 0.1 * size[0]).all()


# ------------------------------------------------------------------------------------
# known mistakes, and the check that sees each


def check_step(step):
    """`step(block, x, alpha)` is what the loop over the block's parts gives, on the
    tokens of a batch.
    """
    rng = np.random.default_rng(0)
    block, x = block_of(rng), rng.normal(size=(2, 4, 6))
    actual, expected = jax.jit(
        lambda x: (step(block, x, 0.3), loop(block, x, 1, 0.3)[0])
    )(x)
    assert_close(actual, expected, rtol=1e-12)


WRONG_STEPS = {
    "uphill": lambda block, x, alpha: x - alpha * block.update(block.norm(x)),
    "the energy of x, not of g": lambda block, x, alpha: x + alpha * block.update(x),
    "∂E/∂x, not ∂E/∂g": (
        lambda block, x, alpha: (
            x - alpha * jax.grad(lambda x: block.energy(block.norm(x)).sum())(x)
        )
    ),
    "of a mean over the batch": (
        lambda block, x, alpha: (
            x + alpha * block.update(block.norm(x)) / (x.shape[0] * x.shape[1])
        )
    ),
    "g in the place of x": (
        lambda block, x, alpha: block.norm(x) + alpha * block.update(block.norm(x))
    ),
    "half of the energy": (
        lambda block, x, alpha: x + alpha * block.attention.update(block.norm(x))
    ),
}


def test_the_step_that_is_right(x64):
    check_step(lambda block, x, alpha: descend(block, x, 1, alpha)[0])


@pytest.mark.parametrize("mistake", WRONG_STEPS)
def test_mistakes_in_the_step_are_caught(x64, mistake):
    with pytest.raises(AssertionError, match="exceeds"):
        check_step(WRONG_STEPS[mistake])


def test_that_the_energy_falls_says_little(x64):
    """An update without attention's second term, or of a mean over B·N, lowers the
    energy as well, here: why gradients are compared, too.
    """
    rng = np.random.default_rng(3)
    block, x = block_of(rng, scale=0.4), rng.normal(size=(2, 4, 6))
    att, others = block.attention, ~jnp.eye(4, dtype=bool)[None, None]

    def as_query_only(g):
        Q, K = (jnp.einsum("bnd,hdy->bhny", g, W[...]) for W in (att.Wq, att.Wk))
        P = jax.nn.softmax(
            jnp.where(others, att.beta[None, :, None, None] * Q @ K.mT, -jnp.inf), -1
        )
        return jnp.einsum("bhny,hdy->bnd", P @ K, att.Wq[...]) + block.memory.update(g)

    @partial(jax.jit, static_argnums=1)
    def energies(x, update):
        def step(x, _):
            g = block.norm(x)
            return x + 0.05 * update(g), block.energy(g)

        return jax.lax.scan(step, x, length=30)[1]

    for update in (block.update, as_query_only, lambda g: block.update(g) / 8):
        assert_descends(energies(x, update))


# ------------------------------------------------------------------------------------
# bad input

NAN, INF = float("nan"), float("inf")
TOKENS = np.ones((2, 3, 4), np.float32)


@pytest.mark.parametrize(
    "x, options, error, match",
    [
        *[
            (TOKENS, dict(steps=steps), ValueError, r"^steps: ")
            for steps in (-1, -12, 2.5, True)
        ],
        *[
            (TOKENS, dict(step_size=a), ValueError, r"^step_size: ")
            for a in (0, 0.0, -0.1, NAN, INF, -INF, np.float32(-1), np.float64(NAN))
        ],
        *[
            (
                TOKENS,
                dict(step_size=jnp.asarray(a, jnp.float32)),
                ValueError,
                r"^step_size: ",
            )
            for a in (0.0, -0.1, NAN, INF)
        ],
        (
            TOKENS,
            dict(step_size=0.2, solver=Euler(0.2)),
            ValueError,
            r"^step_size: the solver has its own",
        ),
        (np.ones(4, np.float32), {}, ValueError, r"^x: .*got \(4,\)"),
        (
            np.ones((2, 3, 5), np.float32),
            {},
            ValueError,
            r"^x: .*D = 4.*got \(2, 3, 5\)",
        ),
        (np.ones((2, 0, 4), np.float32), {}, ValueError, r"^x: .*got \(2, 0, 4\)"),
        (np.ones((2, 3, 4), np.int32), {}, TypeError, "^x: .*int32"),
        ([[[1.0, 2.0, 3.0, 4.0]]], {}, TypeError, "^x: .*list"),
        (TOKENS, dict(mask=np.ones((3, 3), np.float32)), TypeError, "^mask: .*float32"),
        (
            TOKENS,
            dict(mask=np.ones((3, 4), bool)),
            ValueError,
            r"^mask: .*got \(3, 4\)",
        ),
        (
            TOKENS,
            dict(mask=np.ones((3, 3, 2), bool)),
            ValueError,
            r"^mask: .*got \(3, 3, 2\)",
        ),
    ],
    ids=lambda v: f"{v}" if isinstance(v, dict) and "mask" not in v else "",
)
def test_bad_input_is_refused_by_name(x, options, error, match):
    block = EnergyTransformer(4, 2, 3, 5, rngs=nnx.Rngs(0))
    options = {k: jnp.asarray(v) if k == "mask" else v for k, v in options.items()}
    with pytest.raises(error, match=match):
        descend(block, x if isinstance(x, list) else jnp.asarray(x), **options)
