"""Every solver: certified descent, exact counts, samples that do not notice each other,
and honest ends; dense and on graphs.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import block_of, opposed, repelling_pair, ring, tokens
from flax import nnx

from et_nbdev.block import Block, EnergyTransformer
from et_nbdev.dynamics import Euler, descend
from et_nbdev.energy import ExternalField
from et_nbdev.graph.energy import EdgeTransformer
from et_nbdev.solvers import (
    Anderson,
    Backtracking,
    Flow,
    LearnedEuler,
    LearnedMetric,
    Schedule,
    solve,
)
from et_nbdev.testing import assert_close, assert_descends, hessian

pytestmark = pytest.mark.usefixtures("compile_quickly")
METHODS = {
    "euler": Euler(0.05),
    "backtracking": Backtracking(),
    "anderson": Anderson(memory=3),
    "flow": Flow(rtol=1e-4, atol=1e-4),
}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
each_guarded = pytest.mark.parametrize(
    "method", [Backtracking(), Anderson(memory=3)], ids=["backtracking", "anderson"]
)
cost_of = lambda method: getattr(method, "cost", 1)


# --- what all share ---


@pytest.mark.parametrize("kind", ["all pairs", "edges"])
@each_method
def test_what_a_solution_says_is_so(x64, method, kind):
    context = {} if kind == "all pairs" else {"edges": ring()}
    block, x = block_of(kind=EdgeTransformer), tokens(2, 2, 5, 6)
    options = dict(evaluations=60, tolerance=1e-2, states=True)
    found = solve(block, x, method, **options, **context)
    u = block.update(block.norm(found.x), **context)
    total = np.asarray(found.energies.total)
    computed = block.energy(block.norm(found.states), **context)
    assert_close(total, computed, rtol=1e-12)
    assert_descends(total)
    assert (found.evaluations <= 60).all() and found.certificate.holds.all()
    assert (found.certificate.rise == 0).all()
    most = np.max(sum(np.abs(e) for e in found.energies.values()), 0)
    assert_close(found.certificate.rounding, 4 * 2.0**-52 * most, rtol=1e-12)
    np.testing.assert_array_equal(found.settled, found.residual <= 1e-2)
    sigma = np.sqrt(found.x.var(-1, keepdims=True) + 1e-5)
    M = hessian(found.x, jnp.asarray(1.0))
    turn = sigma * np.einsum("...ij,...j->...i", M, u)
    size = lambda v: np.sqrt(np.sum(np.square(v), (-2, -1)))
    largest = size(block.update(block.norm(found.states), **context)).max(0)
    if isinstance(method, Backtracking):  # else it cannot be told from the last one
        assert (largest > 1.01 * size(u)).any()
    assert_close(found.residual, size(turn) / largest, rtol=1e-6)
    assert found.states.shape == (60, *x.shape)
    np.testing.assert_array_equal(found.states[0], x)
    np.testing.assert_array_equal(found.states[-1], found.x)
    moved = 1 + np.flatnonzero((np.diff(found.states, axis=0) != 0).any((1, 2, 3, 4)))
    # a step shows after the last of its evaluations
    assert len(moved) > 2 and ((moved + 1) % cost_of(method) == 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_samples_descend_as_if_alone_each_with_its_own_step_size_and_table(x64, name):
    block, sizes = opposed(block_of(scale=1.0)), jnp.asarray([0.01, 0.3, 50.0])
    x = tokens(3, 5, 6) * jnp.asarray([1.0, 5.0, 0.2])[:, None, None]
    tables = jnp.asarray(np.random.default_rng(2).random((3, 5, 5)) < 0.7)
    run = lambda x, size, mask: solve(
        block,
        x,
        replace(METHODS[name], step_size=size),
        evaluations=60,
        tolerance=1e-2,
        mask=mask,
    )
    together = run(x, sizes, tables)
    for b in range(3):
        alone = run(x[b], float(sizes[b]), tables[b])
        assert_close(together.energies.total[:, b], alone.energies.total, rtol=1e-6)
        for count in ("evaluations", "rejected", "settled"):
            assert getattr(alone, count) == getattr(together, count)[b]


@each_method
def test_what_is_not_a_number_has_not_settled_and_leaves_others_alone(x64, method):
    block, x = block_of(), tokens(2, 5, 6)
    run = lambda x: solve(block, x, method, evaluations=60, tolerance=1e-2)
    well, ill = run(x), run(x.at[0, 0, 0].set(jnp.nan))
    assert not ill.settled[0] and not ill.certificate.holds[0]
    assert np.isnan(ill.residual[0])
    assert_close(ill.x[1], well.x[1])
    assert ill.evaluations[1] == well.evaluations[1]
    huge = solve(block, 1e200 * x, method, evaluations=9, tolerance=0.5)
    assert not huge.settled.any() and np.isnan(huge.residual).all()


class Counted(EnergyTransformer):
    "Counts, while it runs, how often its gradient is computed."


@pytest.mark.parametrize("tolerance", [None, 1e-2])
@each_method
def test_evaluations_are_counted_as_they_are_made(x64, monkeypatch, method, tolerance):
    calls = []

    def counted(block, g, **context):
        count = lambda _: calls.append(None) or np.int32(0)
        energies, update = EnergyTransformer.energies_and_update(block, g, **context)
        zero = jax.ShapeDtypeStruct((), jnp.int32)
        none = jax.pure_callback(
            count, zero, update[0, 0]
        )  # dropped if nobody reads it
        return energies, update + none.astype(g.dtype)

    # from outside: a block's sum is not overridden
    monkeypatch.setattr(Counted, "energies_and_update", counted, raising=False)
    jax.clear_caches()
    most = 50 if tolerance else 13
    options = dict(evaluations=most, tolerance=tolerance)
    found = solve(block_of(kind=Counted), tokens(5, 6), method, **options)
    jax.effects_barrier()
    assert 10 < len(calls) == found.evaluations <= most
    assert tolerance or found.evaluations == most - most % cost_of(method)


# --- certificates ---


def test_a_rise_is_reported_by_euler_and_rejected_by_the_others(x64):
    block, x = repelling_pair()
    many, sizes = jnp.broadcast_to(x, (16, 2, 2)), jnp.geomspace(1e-3, 1e3, 16)
    risen = solve(block, many, Euler(sizes), evaluations=25)
    rise = np.diff(risen.energies.total, axis=0).max(0)
    assert_close(risen.certificate.rise, np.maximum(rise, 0), rtol=1e-12)
    holds = risen.certificate.holds
    np.testing.assert_array_equal(holds, rise <= risen.certificate.rounding)
    assert holds[0] and not holds[-1] and (risen.rejected == 0).all()
    for method in (Backtracking(10.0), Anderson(10.0)):
        guarded = solve(block, x, method, evaluations=40)
        assert guarded.certificate.rise == 0 < guarded.rejected
        assert guarded.energies.total[-1] < 1e-6  # the valley that Euler stepped over


@pytest.mark.parametrize("kind", [Backtracking, Anderson])
@pytest.mark.parametrize(
    "seed, gamma, scale, heads, memory, edges",
    [
        # a verdict that hung on one rounding
        (6, 0.01, 10.0, 1, "power", True),
        (1, 1.0, 1.0, -1, "relu", False),
        (2, 10.0, 10.0, -1, "softmax", True),
        (3, 0.0, 0.1, 1, "relu", False),
    ],
)
def test_no_energy_rises_whatever_the_weights_and_step_sizes(
    x64, kind, seed, gamma, scale, heads, memory, edges
):
    rng, options = np.random.default_rng(seed), dict(gamma=gamma, memory=memory)
    block = block_of(seed, scale=scale, kind=EdgeTransformer, **options)
    block = opposed(block) if heads < 0 else block
    x = jnp.asarray(10 ** rng.uniform(-1, 1) * rng.normal(size=(800, 5, 6)))
    sizes = jnp.asarray(10 ** rng.uniform(-3, 5, 800))
    context = {"edges": ring()} if edges else {}
    options = dict(evaluations=25, states=True, **context)
    found = solve(block, x, kind(sizes), **options)
    assert found.certificate.holds.all() and (found.certificate.rise == 0).all()
    attention, memory = (np.abs(e).max() for e in found.energies.values())
    afresh = block.energy(block.norm(found.states), **context)
    assert np.diff(afresh, axis=0).max() <= 1e-13 * (attention + memory)


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


@each_guarded
def test_in_single_precision_the_bottom_is_known_as_such(method):
    block = EnergyTransformer(6, 2, 3, 8, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (3, 5, 6))
    found = solve(block, x, method, evaluations=500)
    assert (found.evaluations < 500).all() and found.certificate.holds.all()
    assert not found.settled.any()  # no tolerance: nobody asked
    assert (found.residual < 0.02).all()


@each_guarded
@pytest.mark.parametrize("step_size", [1e-12, 1e30, 1e200])
def test_a_first_step_that_is_far_off_is_mended(x64, method, step_size):
    block, x = opposed(block_of(scale=1.0)), tokens(5, 6)
    found = solve(block, x, type(method)(step_size), evaluations=999, tolerance=1e-4)
    assert found.settled and jnp.isfinite(found.x).all()


# --- the steps of each ---


def test_the_flow_is_of_third_order_and_small_euler_steps_converge_to_it(x64):
    block, x = block_of(), tokens(2, 5, 6)
    end = lambda time, tol=1e-9: solve(
        block, x, Flow(tol, tol, time=time), evaluations=6000
    )
    exact = end(2.0)
    assert (exact.evaluations < 6000).all()  # time was up
    gap = lambda x, exact: float(jnp.abs(x - exact.x).max())
    errors = [gap(descend(block, x, n, 2.0 / n)[0], exact) for n in (40, 80, 160)]
    assert errors[0] > 1.8 * errors[1] > 3.24 * errors[2] > 0
    errors, exact = [], end(0.04, 1e-10)
    for steps in (4, 8, 16):
        # no step is rejected, and none can grow: the next one waits for time
        method, y = Flow(1e9, 1e9, 0.04 / steps, time=0.04 / steps), x
        for _ in range(steps):
            y = solve(block, y, method, evaluations=9).x
        errors.append(gap(y, exact))
    # with a second order 4, with the third 8
    assert errors[0] > 5 * errors[1] > 25 * errors[2] > 0
    strict, loose = (
        solve(block, x, Flow(tol, tol, 1e3, time=2.0), evaluations=3000)
        for tol in (1e-6, 1e-2)
    )
    assert (strict.rejected > 0).all()
    assert (strict.evaluations > loose.evaluations).all()


SIZES = [0.3, 0.1, 0.05, 0.05, 0.05]  # of five steps; three are given


def learned(kind, *args):
    "A learned solver with random parameters, and the sizes above."
    solver, rng = kind(*args, param_dtype=jnp.float64), np.random.default_rng(3)
    for w in jax.tree.leaves(nnx.state(solver, nnx.Param)):
        assert w.dtype == jnp.float64
    for name in ("c", "W"):
        if hasattr(solver, name):
            w = getattr(solver, name)
            w[...] = jnp.asarray(rng.normal(size=w.shape))
    solver.log_alpha[...] = jnp.log(jnp.asarray(SIZES[:3]))
    return solver


STEPS = {
    "schedule": lambda: Schedule(SIZES[:3]),
    "learned": lambda: learned(LearnedEuler, 3, 0.1),
    "metric": lambda: learned(LearnedMetric, 3, 6),
    "maps": lambda: learned(LearnedMetric, 3, 6, 0.1, True),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_what_they_say_in_descend_and_in_solve(x64, name):
    block, x, solver = block_of(), tokens(2, 5, 6), STEPS[name]()

    def step(x, t, size):
        g = block.norm(x)
        u = block.update(g)
        if name in ("schedule", "learned"):
            return size * u
        W = solver.W[...] if name == "metric" else solver.W[min(t, 2)]
        a = jax.nn.sigmoid(g @ W.T + solver.c[...][None, None, min(t, 2)])
        M, sigma = (
            hessian(x, block.norm.gamma),
            (x.var(-1, keepdims=True) + 1e-5) ** 0.5,
        )
        return size * a * jnp.einsum("bnij,bnj->bni", M, u) * sigma / block.norm.gamma

    states = [x]
    for t, size in enumerate(SIZES):
        states.append(states[-1] + step(states[-1], t, size))
    path = descend(block, x, 5, solver=solver, states=True)[1]
    assert_close(path.states, jnp.stack(states), rtol=1e-12)
    found = solve(block, x, solver, evaluations=6, states=True)
    assert_close(found.states, path.states, rtol=1e-12)


def test_sizes_of_channels_start_at_half_the_step_size():
    sizes = LearnedMetric(3, 6, 0.2).sizes(jnp.ones((2, 5, 6), jnp.float32), 1)
    assert_close(sizes, jnp.full((2, 5, 6), 0.1, jnp.float32), rtol=1e-6)


# --- inside other programs, and refused ---


@pytest.mark.parametrize("by", ["x", "field", "solver"])
def test_a_search_is_not_differentiated_by_accident(x64, by):
    block = Block(block_of().norm, field=ExternalField())
    given = dict(x=tokens(5, 6), field=jnp.ones((5, 6)), solver=LearnedEuler(3, 0.1))

    def end(value, through=lambda x: x):
        found = solve(block, **given | {by: value}, evaluations=5)
        return jnp.sum(through(found.x)) + (jnp.sum(value) if by == "x" else 0)

    with pytest.raises(TypeError, match="equilibria"):
        jax.grad(end)(given[by])
    slope = jax.grad(partial(end, through=jax.lax.stop_gradient))(given[by])
    for leaf in jax.tree.leaves(slope):
        np.testing.assert_array_equal(leaf, float(by == "x"))


X = np.ones((2, 4, 6), np.float32)


@pytest.mark.parametrize(
    "x, options, error, match",
    [
        *((X, dict(solver=m), TypeError, "^solver: ") for m in ("anderson", Anderson, 0.1)),
        *((X, dict(solver=kind(np.ones(3))), ValueError, r"^step_size: .*\(3,\)")
          for kind in (Euler, Anderson)),
        (X[0, 0], {}, ValueError, r"^x: .*got \(6,\)"),
        (X[..., :5], {}, ValueError, r"^x: .*D = 6.*got \(2, 4, 5\)"),
        (X.astype(np.int32), {}, TypeError, "^x: "),
        (X, dict(mask=np.ones((4, 4), np.float32)), TypeError, "^mask: "),
        (X, dict(mask=np.ones((4, 5), bool)), ValueError, r"^mask: .*got \(4, 5\)"),
        (X, dict(maks=1), TypeError, "^maks: no term"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("run", [descend, solve])
def test_bad_input_is_refused_by_name(run, x, options, error, match):
    block = EnergyTransformer(6, 2, 3, 8, rngs=nnx.Rngs(0))
    with pytest.raises(error, match=match):
        run(block, jnp.asarray(x), **options)


def test_a_solver_has_a_step_size_of_its_own():
    block = EnergyTransformer(6, 2, 3, 8, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="^step_size: .*its own"):
        descend(block, X, step_size=0.2, solver=Euler(0.2))


def test_a_block_that_computes_in_less_than_the_tokens_is_refused(x64):
    for dtype, x in ((jnp.bfloat16, X[0]), (jnp.float32, jnp.ones((4, 6)))):
        block = EnergyTransformer(6, 2, 3, 8, dtype=dtype, rngs=nnx.Rngs(0))
        with pytest.raises(TypeError, match=f"^block: .*{jnp.dtype(dtype)}"):
            solve(block, jnp.asarray(x))
    assert solve(block, X, evaluations=2).evaluations.max() == 2
