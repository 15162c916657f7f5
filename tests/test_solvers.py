"""Every solver: certified descent, exact counts, samples that do not notice each other,
and honest ends; dense and on graphs.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import examples
from flax import nnx
from hypothesis import example, given
from hypothesis import strategies as st

from et_nbdev.block import Block, EnergyTransformer
from et_nbdev.dynamics import Euler, descend
from et_nbdev.energy import ExternalField
from et_nbdev.graph.energy import EdgeIndex, EdgeTransformer
from et_nbdev.norm import hessian
from et_nbdev.solvers import (
    Anderson,
    Backtracking,
    Flow,
    Growing,
    LearnedEuler,
    LearnedMetric,
    Momentum,
    Schedule,
    solve,
)
from et_nbdev.testing import assert_close, assert_descends

pytestmark = pytest.mark.usefixtures("compile_quickly")
METHODS = {
    "euler": Euler(0.05),
    "backtracking": Backtracking(),
    "anderson": Anderson(memory=3),
    "flow": Flow(rtol=1e-4, atol=1e-4),
}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
each_guarded = pytest.mark.parametrize(
    "method",
    [METHODS["backtracking"], METHODS["anderson"]],
    ids=["backtracking", "anderson"],
)


def block_of(
    seed=0, D=6, gamma=1.3, scale=0.5, opposed=False, kind=EdgeTransformer, **options
):
    "A block with random float64 weights, γ and δ."
    rng = np.random.default_rng(seed)
    graphdef, state = nnx.split(
        nnx.eval_shape(
            lambda: kind(
                D, 2, 3, 8, param_dtype=jnp.float64, rngs=nnx.Rngs(0), **options
            )
        )
    )
    block = nnx.merge(
        graphdef,
        jax.tree.map(lambda w: jnp.asarray(scale * rng.normal(size=w.shape)), state),
    )
    if opposed:
        block.attention.Wk[...] = -block.attention.Wq[...]
    block.norm.rho[...] = jnp.asarray(np.log(np.expm1(gamma)) if gamma else -800.0)
    return block


def ring(N=5):
    "An undirected ring with a chord, as edges."
    a, b = np.r_[np.arange(N), 0], np.r_[(np.arange(N) + 1) % N, 2]
    return EdgeIndex(np.r_[a, b], np.r_[b, a], N, backend="xla")


def tokens(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def cost(method):
    "Evaluations in a step."
    return getattr(method, "cost", 1)


def energies_of(block, states, **context):
    "Computed afresh, from the states."
    return np.asarray(block.energy(block.norm(states), **context))


# ------------------------------------------------------------------------------------
# what all share


@pytest.mark.parametrize("kind", ["all pairs", "edges"])
@each_method
def test_what_a_solution_says_is_so(x64, method, kind):
    context = {} if kind == "all pairs" else {"edges": ring()}
    block, x = block_of(), tokens(2, 2, 5, 6)
    found = solve(
        block, x, method, evaluations=60, tolerance=1e-2, states=True, **context
    )
    g, u = block.norm(found.x), block.update(block.norm(found.x), **context)
    total = np.asarray(found.energies.total)
    assert_close(total[-1], block.energy(g, **context), rtol=1e-12)
    assert_close(total[0], block.energy(block.norm(x), **context), rtol=1e-12)
    assert_descends(total)
    assert (
        found.evaluations.shape
        == found.rejected.shape
        == found.residual.shape
        == found.settled.shape
        == (2, 2)
    )
    assert (
        (found.evaluations <= 60).all()
        and found.certificate.holds.all()
        and (found.certificate.rise <= 0).all()
    )
    np.testing.assert_array_equal(found.settled, found.residual <= 1e-2)
    turn = np.einsum(
        "...ij,...j->...i", hessian(found.x, jnp.asarray(1.0)), u
    ) * np.sqrt(found.x.var(-1, keepdims=True) + 1e-5)
    size = lambda v: np.sqrt(np.sum(np.square(v), (-2, -1)))
    largest = size(block.update(block.norm(found.states), **context)).max(0)
    if isinstance(method, Backtracking):
        assert (largest > 1.01 * size(u)).any(), (
            "else the largest force cannot be told from the last one"
        )
    assert_close(found.residual, size(turn) / largest, rtol=1e-6)
    assert total.shape == (60, 2, 2) and found.states.shape == (60, *x.shape)
    np.testing.assert_array_equal(found.states[0], x)
    np.testing.assert_array_equal(found.states[-1], found.x)
    assert_close(total, energies_of(block, found.states, **context), rtol=1e-12)
    most = np.max(sum(np.abs(e) for e in found.energies.values()), 0)
    assert_close(found.certificate.rounding, 4 * 2.0**-52 * most, rtol=1e-12)
    moved = 1 + np.flatnonzero((np.diff(found.states, axis=0) != 0).any((1, 2, 3, 4)))
    # a step shows after the last of its evaluations
    assert len(moved) > 2 and ((moved + 1) % cost(method) == 0).all()


@pytest.mark.parametrize("pairs", ["all pairs", "edges"])
def test_euler_is_descend(x64, pairs):
    block, x = block_of(), tokens(2, 5, 6)
    context = {} if pairs == "all pairs" else {"edges": ring()}
    found = solve(block, x, Euler(0.2), evaluations=21, states=True, **context)
    last, path = descend(block, x, 20, 0.2, states=True, **context)
    assert_close(found.x, last, rtol=1e-12)
    assert_close(found.states, path.states, rtol=1e-12)
    for name in ("attention", "memory"):
        assert_close(found.energies[name], path.energies[name], rtol=1e-12)
    assert (found.evaluations == 21).all() and (found.rejected == 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_samples_descend_as_if_alone_each_with_its_own_step_size_and_its_own_table(
    x64, name
):
    block, sizes = block_of(opposed=True, scale=1.0), jnp.asarray([0.01, 0.3, 50.0])
    x = tokens(3, 5, 6) * jnp.asarray([1.0, 5.0, 0.2])[:, None, None]
    tables = jnp.asarray(np.random.default_rng(2).random((3, 5, 5)) < 0.7)
    make = lambda size: replace(METHODS[name], step_size=size)
    together = solve(block, x, make(sizes), evaluations=60, tolerance=1e-2, mask=tables)
    for b in range(3):
        alone = solve(
            block,
            x[b],
            make(float(sizes[b])),
            evaluations=60,
            tolerance=1e-2,
            mask=tables[b],
        )
        assert_close(together.energies.total[:, b], alone.energies.total, rtol=1e-6)
        for one, all_ in (
            (alone.evaluations, together.evaluations),
            (alone.rejected, together.rejected),
            (alone.settled, together.settled),
        ):
            assert one == all_[b]


@each_method
def test_a_sample_that_is_not_a_number_leaves_the_others_alone(x64, method):
    block, x = block_of(), tokens(2, 5, 6)
    well, ill = (
        solve(block, x, method, evaluations=60, tolerance=1e-2)
        for x in (x, x.at[0, 0, 0].set(jnp.nan))
    )
    assert (
        not ill.settled[0]
        and not ill.certificate.holds[0]
        and np.isnan(ill.residual[0])
    )
    assert_close(ill.x[1], well.x[1], rtol=1e-9)
    assert (
        ill.evaluations[1] == well.evaluations[1] and ill.settled[1] == well.settled[1]
    )


@pytest.mark.parametrize("evaluations", [1, 10])
@each_method
def test_the_budget_is_kept(x64, method, evaluations):
    run = lambda: solve(block_of(), tokens(2, 5, 6), method, evaluations=evaluations)
    if evaluations < cost(method):
        with pytest.raises(ValueError, match="^evaluations: .*at least 3, got 1"):
            run()
        return
    found = run()
    assert (found.evaluations == evaluations // cost(method) * cost(method)).all()
    assert found.energies.total.shape == (evaluations, 2)
    if evaluations > 1:
        assert (found.rejected > 0).all() or (
            found.energies.total[-1] < found.energies.total[0]
        ).all()


@pytest.mark.parametrize(
    "method", [Euler(), Anderson(), Flow()], ids=["euler", "anderson", "flow"]
)
def test_a_variance_that_overflows_has_not_settled(method):
    block = EnergyTransformer(6, 2, 3, 8, rngs=nnx.Rngs(0))
    found = solve(
        block,
        1e20 * jax.random.normal(jax.random.key(0), (4, 6)),
        method,
        evaluations=9,
        tolerance=0.5,
    )
    assert not found.settled and np.isnan(found.residual)


class Counted(EnergyTransformer):
    "Counts, while it runs, how often its gradient is computed."

    calls = []


def counted(block, g, **context):
    "What nobody reads the result of is dropped by the compiler, and does not count."

    def count(_):
        Counted.calls.append(None)
        return np.int32(0)

    energies, update = EnergyTransformer.energies_and_update(block, g, **context)
    zero = jax.ShapeDtypeStruct((), jnp.int32)
    return energies, update + jax.pure_callback(count, zero, update[0, 0]).astype(
        g.dtype
    )


Counted.energies_and_update = counted  # from outside: a block's sum is not overridden


@pytest.mark.parametrize("tolerance", [None, 1e-2])
@each_method
def test_evaluations_are_counted_as_they_are_made(x64, monkeypatch, method, tolerance):
    monkeypatch.setattr(Counted, "calls", calls := [])
    block = block_of(kind=Counted)
    found = solve(block, tokens(5, 6), method, evaluations=50, tolerance=tolerance)
    jax.effects_barrier()
    assert 10 < len(calls) == found.evaluations <= 50


@each_method
def test_it_stops_where_the_energy_is_reached_and_not_before(x64, method):
    block, x = block_of(), tokens(5, 6)
    goal = descend(block, x, 30, 0.05)[1].energies.total[-1]
    found = solve(block, x, method, evaluations=200, until=goal)
    path = np.unique(np.asarray(found.energies.total))[::-1]
    assert path[-1] <= goal < path[-2] and found.evaluations < 200
    more = solve(block, x, method, evaluations=200)
    assert more.energies.total[-1] < path[-1]


def test_who_has_stopped_waits_without_moving(x64):
    block, x = block_of(), tokens(2, 5, 6)
    rest = solve(block, x[0], Backtracking(), evaluations=300, tolerance=1e-8)
    both = jnp.stack([rest.x, x[1]])
    found = solve(block, both, Backtracking(), evaluations=30, tolerance=1e-3)
    assert found.evaluations[0] == 1 and found.evaluations[1] > 1
    np.testing.assert_array_equal(found.x[0], rest.x)
    assert np.ptp(found.energies.total[:, 0]) == 0


@each_guarded
def test_where_it_settles_nothing_turns_any_more(x64, method):
    block, x = block_of(), tokens(3, 5, 6)
    # about what the last digit of an energy can tell
    found = solve(block, x, method, evaluations=2000, tolerance=3e-8)
    assert found.settled.all()
    g = block.norm(found.x)
    after = block.norm(descend(block, found.x, 1, 1e6)[0])
    assert_close(after, g, atol=1e-5)
    long = descend(block, x, 4000, 0.1)[1].energies.total[-1]
    assert (found.energies.total[-1] <= long + 1e-9 * abs(long)).all()


def test_anderson_needs_fewer_evaluations_than_growing_steps_and_these_fewer_than_equal_ones(
    x64,
):
    block, x = block_of(), tokens(8, 5, 6)
    needed = [
        np.median(solve(block, x, method, evaluations=600, tolerance=1e-5).evaluations)
        for method in (Anderson(), Backtracking(), Backtracking(grow=1.0))
    ]
    assert needed[0] < needed[1] < needed[2] / 2


def test_a_longer_state_with_longer_steps_goes_the_same_way(x64):
    block, x = block_of(), tokens(2, 5, 6) * 10
    one, other = (
        solve(block, s * x, Backtracking(0.3 * s), evaluations=40) for s in (1.0, 7.0)
    )
    assert_close(other.energies.total, one.energies.total, rtol=1e-5)


# ------------------------------------------------------------------------------------
# certificates


def repelling_pair():
    block = EnergyTransformer(
        2, 1, 1, 1, beta=1.0, eps=1.0, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    )
    block.norm.delta[...] = jnp.zeros(2)
    block.attention.Wq[...], block.attention.Wk[...] = (
        jnp.array([[[1.0], [0.0]]]),
        jnp.array([[[-1.0], [0.0]]]),
    )
    block.memory.xi[...] = jnp.zeros((1, 2))
    return block, 0.1 * jnp.array([[1.0, -1.0], [1.0, -1.0]])


def test_a_rise_is_reported_by_euler_and_rejected_by_the_others(x64):
    block, x = repelling_pair()
    risen = solve(block, x, Euler(10.0), evaluations=2)
    assert not risen.certificate.holds and risen.rejected == 0
    assert_close(
        risen.certificate.rise,
        risen.energies.total[1] - risen.energies.total[0],
        rtol=1e-12,
    )
    for method in (Backtracking(10.0), Anderson(10.0)):
        guarded = solve(block, x, method, evaluations=40)
        assert (
            guarded.certificate.holds
            and guarded.rejected > 0
            and guarded.certificate.rise == 0
        )
        assert_descends(guarded.energies.total)
        assert guarded.energies.total[-1] < 1e-6  # the valley that Euler stepped over


# a verdict that hung on one rounding
@example(
    seed=6,
    gamma=0.01,
    scale=10.0,
    opposed=False,
    activation="power",
    anderson=True,
    edges=True,
)
@examples(12)
@given(
    seed=st.integers(0, 2**16),
    gamma=st.sampled_from([0.0, 0.01, 1.0, 10.0]),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    opposed=st.booleans(),
    activation=st.sampled_from(["relu", "power", "softmax"]),
    anderson=st.booleans(),
    edges=st.booleans(),
)
def test_no_energy_rises_whatever_the_weights_and_step_sizes(
    x64, seed, gamma, scale, opposed, activation, anderson, edges
):
    rng = np.random.default_rng(seed)
    block = block_of(
        seed, gamma=gamma, scale=scale, opposed=opposed, activation=activation
    )
    # ten thousand starts in all
    x = jnp.asarray(10 ** rng.uniform(-1, 1) * rng.normal(size=(800, 5, 6)))
    sizes = jnp.asarray(10 ** rng.uniform(-3, 5, 800))
    context = {"edges": ring()} if edges else {}
    found = solve(
        block,
        x,
        (Anderson if anderson else Backtracking)(sizes),
        evaluations=25,
        states=True,
        **context,
    )
    assert found.certificate.holds.all() and (found.certificate.rise == 0).all()
    attention, memory = (np.abs(e).max() for e in found.energies.values())
    rises = np.diff(energies_of(block, found.states, **context), axis=0)
    assert rises.max() <= 1e-13 * (attention + memory)


@pytest.mark.parametrize("kind", [Backtracking, Anderson])
def test_a_step_counts_if_and_only_if_it_keeps_its_share_of_the_promise(x64, kind):
    block, x = repelling_pair()
    g, u = block.norm(x), block.update(block.norm(x))
    for size in np.geomspace(0.1, 2.0, 30):
        ahead = block.norm(x + size * u)
        kept = float((block.energy(g) - block.energy(ahead)) / jnp.sum(u * (ahead - g)))
        if kept < 0.7:
            break
    assert 0.3 < kept < 0.7
    for share, rejected in ((0.99 * kept, 0), (1.01 * kept, 1)):
        found = solve(block, x, kind(size, sufficient=share), evaluations=2)
        assert found.rejected == rejected


def test_euler_rises_where_steps_are_too_long_and_says_for_which_samples(x64):
    block, x = repelling_pair()
    found = solve(
        block,
        jnp.broadcast_to(x, (16, 2, 2)),
        Euler(jnp.geomspace(1e-3, 1e3, 16)),
        evaluations=25,
    )
    np.testing.assert_array_equal(
        found.certificate.holds,
        np.diff(found.energies.total, axis=0).max(0) <= found.certificate.rounding,
    )
    assert found.certificate.holds[0] and not found.certificate.holds[-1]


@each_guarded
def test_in_single_precision_the_bottom_is_known_as_such(method):
    block = EnergyTransformer(6, 2, 3, 8, rngs=nnx.Rngs(0))
    found = solve(
        block, jax.random.normal(jax.random.key(0), (3, 5, 6)), method, evaluations=500
    )
    # no tolerance: nobody asked
    assert (
        (found.evaluations < 500).all()
        and found.certificate.holds.all()
        and not found.settled.any()
    )
    assert (found.residual < 0.02).all() and jnp.isfinite(found.x).all()


@each_guarded
@pytest.mark.parametrize("step_size", [1e-12, 1e30])
def test_a_first_step_that_is_far_off_is_mended(x64, method, step_size):
    block, x = block_of(opposed=True, scale=1.0), tokens(5, 6)
    found = solve(block, x, type(method)(step_size), evaluations=400, tolerance=1e-4)
    assert found.settled and jnp.isfinite(found.x).all()


@each_guarded
def test_with_gamma_zero_there_is_nothing_to_do(x64, method):
    block, x = block_of(gamma=0.0), tokens(5, 6)
    assert block.norm.gamma == 0
    found = solve(block, x, method, evaluations=50)
    assert (
        found.certificate.holds
        and np.ptp(found.energies.total) == 0
        and jnp.isfinite(found.x).all()
    )


class Uphill(nnx.Module):
    "A norm with γ < 0, as in an implementation that lets γ go anywhere."

    def __init__(self, norm):
        self.norm, self.dim, self.eps = norm, norm.dim, norm.eps

    def __call__(self, x):
        return 2 * self.norm.delta[...][None] - self.norm(x)

    def turning(self, x, u):
        return self.norm.turning(x, u)


@each_guarded
def test_with_a_negative_gamma_every_step_is_rejected(x64, method):
    block, x = block_of(), tokens(5, 6)
    block.norm = Uphill(block.norm)
    found = solve(block, x, method, evaluations=50)
    np.testing.assert_array_equal(found.x, x)
    assert (
        found.rejected >= 1
        and found.evaluations == found.rejected + 1
        and found.certificate.rise == 0
    )


# ------------------------------------------------------------------------------------
# continuous time


def test_small_euler_steps_converge_to_the_flow(x64):
    block, x = block_of(), tokens(2, 5, 6)
    end = lambda x, time: solve(
        block, x, Flow(rtol=1e-8, atol=1e-8, time=time), evaluations=6000, states=True
    )
    exact = end(x, 2.0)
    assert (exact.evaluations < 6000).all()  # time was up
    errors = [
        float(jnp.abs(descend(block, x, n, 2.0 / n)[0] - exact.x).max())
        for n in (40, 80, 160)
    ]
    assert errors[0] > 1.8 * errors[1] > 3.24 * errors[2] > 0
    assert_close(end(end(x, 1.0).x, 1.0).x, exact.x, rtol=1e-6)
    assert_descends(exact.energies.total)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_the_flow_keeps_the_dtype_and_stops_at_its_event(x64, dtype):
    block = EnergyTransformer(6, 2, 3, 8, rngs=nnx.Rngs(0))
    found = solve(
        block, tokens(2, 5, 6).astype(dtype), Flow(), evaluations=400, tolerance=0.05
    )
    assert (
        found.x.dtype == dtype and found.settled.all() and found.evaluations.max() < 400
    )


def test_the_flow_is_of_third_order_and_its_error_is_estimated(x64):
    "A step of half the size has an eighth of the error over a given time."
    block, x = block_of(), tokens(2, 5, 6)
    exact = solve(block, x, Flow(1e-10, 1e-10, time=0.04), evaluations=6000).x
    errors = []
    for steps in (4, 8, 16):
        # no step is rejected, and none can grow: the next one waits for time
        method, y = Flow(1e9, 1e9, 0.04 / steps, time=0.04 / steps), x
        for _ in range(steps):
            y = solve(block, y, method, evaluations=9).x
        errors.append(float(jnp.abs(y - exact).max()))
    # with a second order 4, with the third 8
    assert errors[0] > 5 * errors[1] > 25 * errors[2] > 0
    strict, loose = (
        solve(block, x, Flow(tol, tol, 1e3, time=2.0), evaluations=3000, states=True)
        for tol in (1e-6, 1e-2)
    )
    assert (strict.rejected > 0).all() and (
        strict.evaluations > loose.evaluations
    ).all()


def test_a_budget_that_is_too_small_ends_the_flow_early(x64):
    found = solve(
        block_of(),
        tokens(2, 5, 6),
        Flow(rtol=1e-8, atol=1e-8),
        evaluations=60,
        tolerance=1e-6,
    )
    assert (
        (found.evaluations <= 60).all()
        and not found.settled.any()
        and jnp.isfinite(found.x).all()
    )


# ------------------------------------------------------------------------------------
# compiled, batched, refused


def test_one_program_for_all_numbers_and_inside_other_programs(x64):
    block, x, traces = block_of(), tokens(3, 5, 6), []
    graphdef, state = nnx.split(block)

    @jax.jit
    def end(state, x, step_size, tolerance):
        traces.append(None)
        return solve(
            nnx.merge(graphdef, state),
            x,
            Backtracking(step_size),
            evaluations=20,
            tolerance=tolerance,
        ).energies.total

    for step_size, tolerance in ((0.1, 1e-2), (0.3, 1e-3)):
        assert_close(
            end(state, x, step_size, tolerance),
            solve(
                block, x, Backtracking(step_size), evaluations=20, tolerance=tolerance
            ).energies.total,
            rtol=1e-9,
        )
    assert len(traces) == 1
    one = jax.vmap(
        lambda x: solve(block, x, Anderson(), evaluations=20).energies.total, out_axes=1
    )(x)
    assert_close(
        one, solve(block, x, Anderson(), evaluations=20).energies.total, rtol=1e-6
    )


@pytest.mark.parametrize(
    "method", [METHODS["euler"], METHODS["flow"]], ids=["loop", "flow"]
)
def test_a_search_is_not_differentiated_by_accident(x64, method):
    block, x = block_of(), tokens(5, 6)
    end = lambda x, f: (
        jnp.sum(f(solve(block, x, method, evaluations=20).x)) + jnp.sum(x)
    )
    with pytest.raises(TypeError, match="equilibria"):
        jax.grad(partial(end, f=lambda x: x))(x)
    np.testing.assert_array_equal(
        jax.grad(partial(end, f=jax.lax.stop_gradient))(x), 1.0
    )


def test_nor_by_its_context_or_its_solver(x64):
    block, x = Block(block_of().norm, field=ExternalField()), tokens(5, 6)
    end = lambda field, solver: jnp.sum(
        solve(block, x, solver, evaluations=5, field=field).x
    )
    for by in (0, 1):
        with pytest.raises(TypeError, match="equilibria"):
            jax.grad(end, by)(jnp.ones_like(x), LearnedEuler(3, 0.1))


# ------------------------------------------------------------------------------------
# the steps of the simple ones

SIZES = [0.3, 0.1, 0.05, 0.05, 0.05]
METRIC = dict(steps=3, dim=6, step_size=0.1)


def test_sizes_of_channels_start_at_half_the_step_size():
    sizes = LearnedMetric(3, 6, 0.2).sizes(jnp.ones((2, 5, 6), jnp.float32), 1)
    assert_close(sizes, jnp.full((2, 5, 6), 0.1, jnp.float32), rtol=1e-6)


@pytest.mark.parametrize(
    "name", ["growing", "schedule", "momentum", "learned", "gated", "metric", "maps"]
)
def test_steps_are_what_they_say(x64, name):
    block, x, v = block_of(), tokens(2, 5, 6), 0.0
    rng = np.random.default_rng(3)
    learned = LearnedEuler(
        3, 0.1, gate=6 if name == "gated" else None, param_dtype=jnp.float64
    )
    learned.log_alpha[...] = jnp.log(jnp.asarray(SIZES[:3]))
    if name == "gated":
        learned.w[...], learned.b[...] = (
            jnp.asarray(rng.normal(size=6)),
            jnp.asarray(0.4),
        )
    metric = LearnedMetric(
        **METRIC, map_per_step=name == "maps", param_dtype=jnp.float64
    )
    metric.log_alpha[...] = learned.log_alpha[...]
    metric.c[...] = jnp.asarray(rng.normal(size=(3, 6)))
    metric.W[...] = jnp.asarray(rng.normal(size=metric.W.shape))
    solver = {
        "growing": Growing(0.05, 1.3),
        "schedule": Schedule(np.array(SIZES[:3])),
        "momentum": Momentum(0.05, 0.6),
        "learned": learned,
        "gated": learned,
        "metric": metric,
        "maps": metric,
    }[name]
    states = [x]
    for t, size in enumerate(SIZES):
        g = block.norm(states[-1])
        u = block.update(g)
        if name == "growing":
            step = 0.05 * 1.3**t * u
        elif name == "momentum":
            step = v = 0.6 * v + 0.05 * u
        elif name == "gated":
            step = size * jax.nn.sigmoid(g @ learned.w[...] + 0.4)[..., None] * u
        elif name in ("metric", "maps"):
            W = metric.W[...] if name == "metric" else metric.W[min(t, 2)]
            logits = g @ W.T
            a = jax.nn.sigmoid(logits + metric.c[...][None, None, min(t, 2)])
            M = hessian(states[-1], block.norm.gamma)
            v = states[-1].var(-1, keepdims=True) + 1e-5
            turned = jnp.einsum("bnij,bnj->bni", M, u) * v**0.5 / block.norm.gamma
            step = size * a * turned
        else:
            step = size * u
        states.append(states[-1] + step)
    path = descend(block, x, 5, solver=solver, states=True)[1]
    assert_close(path.states, jnp.stack(states), rtol=1e-12)
    found = jax.jit(lambda solver: solve(block, x, solver, evaluations=6, states=True))(
        solver
    )
    assert_close(found.states, path.states, rtol=1e-12)
    assert (found.rejected == 0).all()


X, NAN, INF = np.ones((2, 4, 6), np.float32), float("nan"), float("inf")


@pytest.mark.parametrize(
    "x, method, options, error, match",
    [
        *[
            (X, lambda m=m: m, {}, TypeError, "^solver: ")
            for m in ("anderson", Anderson, 0.1)
        ],
        *[
            (X, partial(kind, step_size=a), {}, ValueError, "^step_size: ")
            for kind in (Euler, Growing, Momentum, Backtracking, Anderson, Flow)
            for a in (0.0, -1.0, NAN, INF, True, "x")
        ],
        *[
            (
                X,
                partial(kind, step_size=np.ones(3)),
                {},
                ValueError,
                r"^step_size: .*\(3,\)",
            )
            for kind in (Euler, Growing, Momentum, Anderson, Flow)
        ],
        *[
            (X, partial(LearnedEuler, 3, a), {}, ValueError, "^step_size: ")
            for a in (0.0, -1.0, NAN, INF, [0.1] * 3)
        ],
        *[(X, partial(LearnedEuler, n), {}, ValueError, "^steps: ") for n in (0, 1.5)],
        *[
            (X, partial(LearnedEuler, 3, gate=n), {}, ValueError, "^gate: ")
            for n in (0, 1.5)
        ],
        *[
            (
                X,
                partial(LearnedMetric, **{**METRIC, name: n}),
                {},
                ValueError,
                f"^{name}: ",
            )
            for name in METRIC
            for n in (0, -1, NAN, [0.1] * 3)
        ],
        *[
            (X, partial(Schedule, a), {}, ValueError, "^step_sizes: ")
            for a in ([0.0], [1.0, -1.0], [NAN], [INF], [], [[1.0]], 0.1)
        ],
        *[
            (X, partial(Growing, factor=a), {}, ValueError, "^factor: ")
            for a in (0.0, -1.0, NAN, INF)
        ],
        *[
            (X, partial(Momentum, momentum=a), {}, ValueError, "^momentum: ")
            for a in (-0.1, 1.0, NAN)
        ],
        *[
            (X, partial(Backtracking, grow=a), {}, ValueError, "^grow: ")
            for a in (0.99, NAN, INF)
        ],
        *[
            (X, partial(Backtracking, shrink=a), {}, ValueError, "^shrink: ")
            for a in (0.0, 1.0, NAN)
        ],
        *[
            (X, partial(Backtracking, sufficient=a), {}, ValueError, "^sufficient: ")
            for a in (-0.1, 1.0, NAN)
        ],
        *[
            (X, partial(Anderson, memory=a), {}, ValueError, "^memory: ")
            for a in (0, 2.5, -1)
        ],
        *[
            (X, partial(Flow, **{name: a}), {}, ValueError, f"^{name}: ")
            for name in ("rtol", "atol", "time")
            for a in (0.0, -1.0, NAN)
        ],
        *[
            (X, Euler, dict(evaluations=n), ValueError, "^evaluations: ")
            for n in (0, -1, 2.5, True)
        ],
        *[
            (X, Euler, dict(tolerance=t), ValueError, "^tolerance: ")
            for t in (0.0, -1.0, NAN, INF, True, 1e-50)
        ],
        *[
            (X, Euler, dict(until=e), ValueError, "^until: ")
            for e in (NAN, True, np.array([0.0, NAN]))
        ],
        (X, Euler, dict(until=np.ones(3)), ValueError, r"^until: .*\(2,\).*\(3,\)"),
        (np.ones((2, 4, 5), np.float32), Euler, {}, ValueError, "^x: .*D = 6"),
        (np.ones((2, 4, 6), np.int32), Euler, {}, TypeError, "^x: "),
        (jnp.ones((2, 4, 6), jnp.bfloat16), Euler, {}, TypeError, "^x: .*bfloat16"),
        (X, Euler, dict(mask=np.ones((4, 4), np.float32)), TypeError, "^mask: "),
    ],
)
def test_bad_input_is_refused_by_name(x, method, options, error, match):
    block = EnergyTransformer(6, 2, 3, 8, rngs=nnx.Rngs(0))
    options = {k: jnp.asarray(v) if k == "mask" else v for k, v in options.items()}
    with pytest.raises(error, match=match):
        solve(block, jnp.asarray(x), method(), **options)


def test_a_block_that_computes_in_less_than_the_tokens_is_refused(x64):
    for dtype, x in (
        (jnp.bfloat16, jnp.ones((4, 6), jnp.float32)),
        (jnp.float32, jnp.ones((4, 6))),
    ):
        block = EnergyTransformer(6, 2, 3, 8, dtype=dtype, rngs=nnx.Rngs(0))
        with pytest.raises(TypeError, match=f"^block: .*{jnp.dtype(dtype)}"):
            solve(block, x)
    assert solve(block, x.astype(jnp.float32), evaluations=2).evaluations == 2
