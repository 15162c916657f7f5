"""The descent: one scan, equal to the loop it stands for, and the ways in which its
energy falls or, knowingly, does not.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import block_of, repelling_pair, tokens
from flax import nnx

from et_nbdev.block import EnergyTransformer
from et_nbdev.dynamics import Euler, descend
from et_nbdev.norm import turn
from et_nbdev.solvers import Anderson, solve
from et_nbdev.testing import assert_close, assert_descends

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("compile_quickly")]


def loop(block, x, steps=12, step_size=0.1, **context):
    "What `descend` stands for: last state, energies apart, and all states."
    energies, states = [], []
    for t in range(steps + 1):
        g = block.norm(x)
        attention, memory = block.attention, block.memory
        energies.append((attention.energy(g, **context), memory.energy(g)))
        states.append(x)
        if t < steps:
            x = x + step_size * (attention.update(g, **context) + memory.update(g))
    return x, [jnp.stack(e) for e in zip(*energies)], jnp.stack(states)


@pytest.mark.parametrize(
    "lead, steps, step_size, mask, options",
    [
        ((2,), 3, 0.3, "per sample", dict(beta=nnx.Param(0.4))),
        ((2, 2), 4, 0.02, "shared", dict(memory="softmax")),
    ],
    ids=["learned", "shared mask"],
)
def test_scan_rematerialized_and_unrolled_are_the_loop_in_values_and_gradients(
    x64, lead, steps, step_size, mask, options
):
    rng = np.random.default_rng(steps)
    graphdef, state = nnx.split(block_of(**options))
    x, v = tokens(*lead, 4, 6), rng.normal(size=(*lead, 4, 6))
    w = rng.normal(size=(2, steps + 1, *lead))
    shape = (4, 4) if mask == "shared" else (*lead, 4, 4)
    context = {"mask": rng.random(shape) < 0.6}

    def loss(last, energies, states):
        "Of the last state and of every energy on the way."
        parts = [jnp.vdot(v, last), *map(jnp.vdot, w, energies)]
        return sum(parts), (last, *energies, states)

    def by_loop(state, x):
        return loss(*loop(nnx.merge(graphdef, state), x, steps, step_size, **context))

    def by_scan(state, x, **variant):
        block, given = nnx.merge(graphdef, state), dict(states=True, **variant)
        last, path = descend(block, x, steps, step_size, **given, **context)
        return loss(last, path.energies.values(), path.states)

    both = lambda f: jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(state, x)
    expected = both(by_loop)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(expected[1]))
    for variant in (dict(), dict(unroll=True), dict(remat=True, unroll=2)):
        found = both(partial(by_scan, **variant))
        close = partial(assert_close, rtol=1e-12, atol=1e-12)
        jax.tree.map(close, found, expected)


def test_a_trajectory_has_both_ends_and_the_papers_defaults(x64):
    block, x = block_of(), tokens(2, 2, 4, 6)
    for steps in (0, 3):
        last, path = descend(block, x, steps, states=True)
        total = path.energies["attention"] + path.energies["memory"]
        np.testing.assert_array_equal(path.energies.total, total)
        assert total.shape == (steps + 1, 2, 2)
        assert path.states.shape == (steps + 1, *x.shape)
        np.testing.assert_array_equal(path.states[0], x)
        np.testing.assert_array_equal(path.states[-1], last)
        assert descend(block, x, steps)[1].states is None
    by_default = jax.jit(lambda x: loop(block, x, 12, 0.1)[0])(x)
    assert_close(descend(block, x)[0], by_default, rtol=1e-12)
    assert_close(block(x), block.norm(descend(block, x)[0]))


@pytest.mark.parametrize(
    "dtype, options",
    [(jnp.float32, {}), (jnp.bfloat16, {}), (jnp.float32, dict(dtype=jnp.bfloat16))],
    ids=str,
)
def test_tokens_keep_their_dtype_and_energies_are_single(dtype, options):
    make = lambda **o: EnergyTransformer(8, 2, 4, 16, rngs=nnx.Rngs(0), **o)
    x = jax.random.normal(jax.random.key(0), (2, 3, 8)).astype(dtype)
    last, path = descend(make(**options), x, 3, states=True)
    assert last.dtype == path.states.dtype == dtype
    reference = descend(make(), x.astype(jnp.float32), 3)
    assert_close(last.astype(np.float32), reference[0], rtol=2e-2)
    assert_close(path.energies.total, reference[1].energies.total, rtol=2e-2)


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


# --- down, and when not ---


def test_a_step_too_large_makes_the_energy_rise(x64):
    "Both tokens step over the valley at once, and land higher on its other side."
    block, x = repelling_pair()
    assert_descends(descend(block, x, 30, 0.05)[1].energies.total)
    E = descend(block, x, 1, 10.0)[1].energies.total
    # g of the start, so E = 2 s², and each moves by −2 α s in its first entry
    s = 0.1 / np.sqrt(1.01)
    spread = (0.2 - 20 * s) / 2
    expected = [2 * s**2, 2 * spread**2 / (spread**2 + 1)]
    np.testing.assert_allclose(E, expected, rtol=1e-9)
    assert E[1] > 10 * E[0]


# --- bad input ---

NAN, INF = float("nan"), float("inf")
X = np.ones((2, 3, 4), np.float32)


@pytest.mark.parametrize(
    "x, options, error, match",
    [
        *[(X, dict(steps=n), ValueError, "^steps: ") for n in (-1, 2.5, True)],
        *[
            (X, dict(step_size=a), ValueError, "^step_size: ")
            for a in (0, -0.1, NAN, INF, np.float32(-1), jnp.float32(NAN), [0.1] * 3)
        ],
        (
            X,
            dict(step_size=0.2, solver=Euler(0.2)),
            ValueError,
            "^step_size: .*its own",
        ),
        (X, dict(maks=1), TypeError, "^maks: no term"),
        (X[0, 0], {}, ValueError, r"^x: .*got \(4,\)"),
        (X[..., :3], {}, ValueError, r"^x: .*D = 4.*got \(2, 3, 3\)"),
        (X, dict(mask=np.ones((3, 4), bool)), ValueError, r"^mask: .*got \(3, 4\)"),
    ],
)
def test_bad_input_is_refused_by_name(x, options, error, match):
    block = EnergyTransformer(4, 2, 3, 5, rngs=nnx.Rngs(0))
    with pytest.raises(error, match=match):
        descend(block, jnp.asarray(x), **options)


def test_that_the_energy_falls_says_little(x64):
    "An update without attention's key term, or of a mean, lowers the energy as well."
    block, x = block_of(seed=3, scale=0.4, gamma=1.7), tokens(2, 4, 6, seed=3)
    att, others = block.attention, ~jnp.eye(4, dtype=bool)[None, None]

    def query_only(g):
        Q, K = att.queries_and_keys(g)
        scores = att.beta[None, :, None, None] * Q @ K.mT
        P = jax.nn.softmax(jnp.where(others, scores, -jnp.inf), -1)
        pull = jnp.einsum("bhny,hdy->bnd", P @ K, att.Wq[...])
        return pull + block.memory.update(g)

    for update in (query_only, lambda g: block.update(g) / 8):
        step = lambda x, _: (
            x + 0.05 * update(block.norm(x)),
            block.energy(block.norm(x)),
        )
        assert_descends(jax.lax.scan(step, x, length=30)[1])


def turning_share(block, x):
    "The part of the force that can turn the tokens, as a share of the force."
    u = block.update(block.norm(x))
    return float(jnp.linalg.norm(turn(block.norm, x, u)) / jnp.linalg.norm(u))


def test_states_run_away_while_normalized_tokens_settle(x64):
    block, x = block_of(D=8, K=16, gamma=1.7), tokens(3, 5, 8, seed=0)
    _, path = descend(block, x, 500, states=True)
    g = np.asarray(block.norm(path.states))
    moved = np.linalg.norm(np.diff(g, axis=0), axis=-1).mean((1, 2))
    assert moved[-1] < 5e-3 * moved[0]
    assert turning_share(block, path.states[-1]) > 0.03 * turning_share(block, x)
    rest = solve(block, x, Anderson(), evaluations=2000, tolerance=1e-7)
    assert rest.settled.all() and turning_share(block, rest.x) < 1e-7
    assert (path.energies.total[-1] - rest.energies.total[-1] > 0.5).all()
    # from there x grows by the same amount in every step, and g stays
    _, path = descend(block, rest.x, 200, states=True)
    centered = path.states - path.states.mean(-1, keepdims=True)
    growth = np.diff(np.linalg.norm(centered, axis=-1), axis=0)
    assert (growth > 0).all()
    np.testing.assert_allclose(growth, np.broadcast_to(growth[0], growth.shape), 1e-4)
    g = np.asarray(block.norm(path.states))
    assert np.abs(g - g[0]).max() < 1e-5
