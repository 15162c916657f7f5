"""Descents compile themselves: once, never from what is no longer there, and inside of
every transformation of JAX; what they store, and what they leave out.
"""

from functools import partial

import blocks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from et_nbdev import (
    Block,
    Energy,
    EnergyLayerNorm,
    EnergyTransformer,
    Euler,
    ExternalField,
    descend,
    solve,
)
from et_nbdev.solvers import Backtracking
from et_nbdev.testing import assert_close

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("compile_quickly")]
D, N = 6, 4


def block_of(seed=0, **options):
    return EnergyTransformer(D, 2, 3, 5, rngs=nnx.Rngs(seed), **options)


def tokens(dtype=jnp.float32, batch=4):
    return jax.random.normal(jax.random.key(1), (batch, N, D), dtype)


WAYS = {
    "descend": lambda block, x, **c: block.norm(descend(block, x, 3, 0.1, **c)[0]),
    "block": lambda block, x, **c: block(x, 3, 0.1, **c),
    "solve": lambda block, x, **c: block.norm(
        jax.lax.stop_gradient(solve(block, x, Euler(0.1), evaluations=4, **c)).x
    ),
}


# ------------------------------------------------------------------------------------
# ways × transformations: each gives what the plain call gives


def in_scan(run, block, x):
    return jax.lax.scan(lambda _, one: (None, run(block, one)), None, x)[1]


def ensembles(run, block, x):
    make = nnx.vmap(lambda rngs: EnergyTransformer(D, 2, 3, 5, rngs=rngs))
    members = make(nnx.Rngs(0).fork(split=2))
    found = nnx.vmap(run, in_axes=(0, None))(members, x)
    graphdef, states = nnx.split(members)
    for i in range(2):
        member = nnx.merge(graphdef, jax.tree.map(lambda a: a[i], states))
        assert_close(found[i], run(member, x), rtol=1e-5)
    return run(block, x)


def sharded(run, block, x, kind):
    mesh = Mesh(np.array(jax.devices()[:1]), ("samples",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        spread = NamedSharding(mesh, PartitionSpec("samples"))
        return np.asarray(run(block, jax.device_put(x, spread)))


def in_shard_map(run, block, x):
    mesh = jax.make_mesh((1,), ("samples",), axis_types=(AxisType.Auto,))
    spread = PartitionSpec("samples")
    inside = jax.shard_map(
        partial(run, block), mesh=mesh, in_specs=spread, out_specs=spread
    )
    return inside(x)


SAME = {
    "jit": lambda run, block, x: jax.jit(run)(block, x),
    "nnx.jit": lambda run, block, x: nnx.jit(run)(block, x),
    "vmap": lambda run, block, x: jax.vmap(partial(run, block))(x),
    "scan": in_scan,
    "remat": lambda run, block, x: jax.checkpoint(run)(block, x),
    "nnx.remat": lambda run, block, x: nnx.remat(run)(block, x),
    "ensemble": ensembles,
    "shard_map": in_shard_map,
    "explicit sharding": partial(sharded, kind=AxisType.Explicit),
    "automatic sharding": partial(sharded, kind=AxisType.Auto),
}


@pytest.mark.parametrize("way", ["descend", "solve"])
@pytest.mark.parametrize("transformation", SAME)
def test_a_descent_is_the_same_inside_of_a_transformation(way, transformation):
    run, block, x = WAYS[way], block_of(), tokens()
    found = SAME[transformation](run, block, x)
    assert_close(found, run(block, x), rtol=1e-5)


@pytest.mark.parametrize("way", ["descend", "block"])
def test_derivatives_are_those_of_the_steps_written_out(x64, way):
    run, block, x = WAYS[way], block_of(param_dtype=jnp.float64), tokens(jnp.float64)
    v = jax.random.normal(jax.random.key(2), x.shape)

    def written_out(block, x):
        for _ in range(3):
            x = x + 0.1 * block.update(block.norm(x))
        return block.norm(x)

    def derivatives(run, block, x):
        loss = lambda block, x: jnp.sum(run(block, x) ** 3)
        slope = lambda x: jax.grad(loss, argnums=1)(block, x)
        return (
            run(block, x),
            jax.grad(loss, argnums=(0, 1))(block, x),
            jax.jvp(partial(run, block), (x,), (v,))[1],
            jax.jvp(slope, (x,), (v,))[1],
        )

    found = derivatives(run, block, x)
    wanted = jax.jit(partial(derivatives, written_out))(block, x)
    jax.tree.map(assert_close, found, wanted)


# ------------------------------------------------------------------------------------
# compiled once


class Listed(Energy):
    "A term whose strength is in a list, a dict, an object, …: whatever `held` is."

    def __init__(self, held, read):
        self.held, self.read = held, read

    def token_energy(self, g, mask=None):
        TRACES.append(None)
        return self.read(self.held) * g[..., 0]


TRACES = []


def traced(call):
    "How often the energy is traced by a call."
    before = len(TRACES)
    jax.block_until_ready(call())
    return len(TRACES) - before


@pytest.mark.parametrize("way", WAYS)
def test_a_second_call_compiles_nothing(way):
    run, x = WAYS[way], tokens()
    own = lambda: Listed(2.0 + len(way), float)  # of no other program
    field = Block(EnergyLayerNorm(D), field=ExternalField(), own=own())
    assert traced(lambda: run(field, x, field=jnp.ones(D))) > 0
    field.norm.delta[...] = jnp.ones(D)
    twin = Block(EnergyLayerNorm(D), field=ExternalField(), own=own())
    for block in (field, twin):  # a changed weight, another block, a changed context
        for strength in (1.0, 2.0):
            assert traced(lambda: run(block, x, field=strength * jnp.ones(D))) == 0
    assert traced(lambda: run(field, x[:2], field=jnp.ones(D))) > 0
    assert traced(lambda: run(field, x[:2], field=jnp.zeros(D))) == 0


def test_another_step_size_or_solver_number_compiles_nothing():
    block, x = Block(EnergyLayerNorm(D), own=Listed(2.0, float)), tokens()
    for solver in (Euler, Backtracking):
        traced(lambda: descend(block, x, 3, solver=solver(0.1)))
        assert traced(lambda: descend(block, x, 3, solver=solver(0.3))) == 0
        traced(lambda: solve(block, x, solver(0.1), evaluations=4))
        assert traced(lambda: solve(block, x, solver(0.3), evaluations=4)) == 0
    moved = [descend(block, x, 3, alpha)[0] for alpha in (0.1, 0.2)]
    assert_close(moved[1] - x, 2 * (moved[0] - x), rtol=1e-4)


class Held:
    "Some object."

    def __init__(self):
        self.strength = 1.0


class Slotted:
    __slots__ = "strength"

    def __init__(self):
        self.strength = 1.0


class Labeled(list):
    "A list with an attribute."

    strength = 1.0


def changes():
    "(what a term holds, how the term reads it, how it is changed in place)."
    held, array, deep = [1.0], Held(), [{"a": (Held(),)}]
    array.strength = np.ones(1)
    double = lambda h: setattr(h, "strength", 2.0)
    inside, entry = lambda h: h[0]["a"][0], lambda h: float(h.strength[0])
    table = {
        "a list": ([1.0], lambda h: h[0], set_first),
        "a dict": ({"a": 1.0}, lambda h: h["a"], lambda h: h.update(a=2.0)),
        "a function": (lambda: held[0], lambda h: h(), lambda h: set_first(held)),
        "objects in a list": (
            deep,
            lambda h: inside(h).strength,
            lambda h: double(inside(h)),
        ),
        "an array": (array, entry, lambda h: set_first(h.strength)),
    }
    for one in (Held(), Slotted(), Labeled([3.0])):
        table[type(one).__name__] = one, lambda h: h.strength, double
    return table


def set_first(held):
    held[0] = 2.0


@pytest.mark.parametrize("kind", changes())
def test_what_changes_in_place_is_seen(kind):
    held, read, change = changes()[kind]
    block, x = Block(EnergyLayerNorm(D), own=Listed(held, read)), tokens()
    energy = lambda: descend(block, x, 2)[1].energies.total[0]
    before = energy()
    assert traced(energy) == 0
    change(held)
    assert_close(energy(), 2 * before, rtol=1e-6)


class Plain:
    "A solver that is no pytree."

    def __init__(self, step_size):
        self.step_size = step_size

    def init(self, look, x):
        return x

    def step(self, look, x):
        view = look(x)
        return x + self.step_size * view.update, view


def test_a_solver_of_a_plain_class_works_and_may_change():
    block, x, solver = block_of(), tokens(), Plain(0.1)
    for step_size in (0.1, 0.2):
        solver.step_size = step_size
        wanted = descend(block, x, 3, step_size)[0]
        assert_close(descend(block, x, 3, solver=solver)[0], wanted, rtol=1e-6)
        found = solve(block, x, solver, evaluations=4)
        assert_close(found.x, wanted, rtol=1e-6)


def test_a_solver_of_a_plain_class_may_hold_what_is_traced():
    block, x = block_of(), tokens()
    end = lambda solver: descend(block, x, 3, solver=solver)[0].sum()
    found = jax.jit(jax.grad(lambda alpha: end(Plain(alpha))))(0.1)
    assert_close(found, jax.grad(lambda alpha: end(Euler(alpha)))(0.1), rtol=1e-5)


def test_functions_of_one_code_and_other_globals_differ():
    x, energies = tokens(), []
    for strength in (1.0, 2.0):
        space = {"strength": strength}
        exec("read = lambda held: strength", space)
        block = Block(EnergyLayerNorm(D), own=Listed([], space["read"]))
        energies.append(descend(block, x, 2)[1].energies.total[0])
    assert_close(energies[1], 2 * energies[0], rtol=1e-6)


def test_context_may_come_and_go_and_be_a_list():
    block, x = block_of(), tokens()
    mask = np.tri(N, k=-1, dtype=bool)
    bias = np.linspace(-1, 1, N * N).reshape(N, N)
    for way in WAYS.values():
        plain = way(block, x)
        seen = way(block, x, mask=jnp.asarray(mask), bias=jnp.asarray(bias))
        assert np.abs(seen - plain).max() > 1e-3
        listed = way(block, x, mask=mask.tolist(), bias=bias.tolist())
        assert_close(listed, seen, rtol=1e-6)
        assert_close(way(block, x, mask=None), plain, rtol=1e-6)
    with pytest.raises(ValueError, match="^bias: its rows differ in length"):
        descend(block, x, bias=[[0.0, 1.0], [2.0]])
    g = block.norm(x)
    with_lists = block.energy(g, mask=mask.tolist(), bias=bias.tolist())
    assert_close(with_lists, block.energy(g, mask=mask, bias=bias), rtol=1e-6)


# ------------------------------------------------------------------------------------
# terms that are no function of g, in our words


class Dropped(Energy):
    def __init__(self):
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def token_energy(self, g):
        return self.dropout(g).sum(-1)


class Counting(Energy):
    def __init__(self):
        self.count = nnx.Variable(jnp.zeros(()))

    def token_energy(self, g):
        self.count[...] = self.count[...] + 1
        return g.sum(-1)


class NumPy(Energy):
    def __init__(self):
        self.directions = np.arange(3 * D, dtype=np.float32).reshape(3, D)

    def token_energy(self, g):
        return (g @ jnp.asarray(np.linalg.pinv(self.directions))).sum(-1)


class Deciding(Energy):
    def token_energy(self, g):
        return g.sum(-1) if g.sum() > 0 else -g.sum(-1)


@pytest.mark.parametrize(
    "kind, words",
    [
        (Dropped, "^own: changes its state"),
        (Counting, "^own: changes its state"),
        (NumPy, "^own: treats an array as one of NumPy"),
        (Deciding, "^own: treats an array as .* Python number"),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_a_term_that_is_no_function_of_g_is_named(way, kind, words):
    block = Block(EnergyLayerNorm(D), own=kind())
    with pytest.raises(TypeError, match=words):
        WAYS[way](block, tokens())


@pytest.mark.parametrize("held", [(i for i in "1"), {}.keys()])
def test_what_cannot_be_compared_is_named(held):
    block = Block(EnergyLayerNorm(D), own=Listed(held, float))
    said = f"hold a {type(held).__name__}, and nothing tells"
    for way in WAYS.values():
        with pytest.raises(TypeError, match=said):
            way(block, tokens())


def test_energies_are_at_least_single_precision_whoever_wrote_the_term():
    class Squared(Energy):
        def token_energy(self, g):
            return (g**2).sum(-1) / 2

    block = Block(EnergyLayerNorm(D), own=Squared())
    x = tokens(jnp.bfloat16)
    energies, update = block.energies_and_update(block.norm(x))
    assert energies["own"].dtype == jnp.float32 and update.dtype == jnp.bfloat16
    last, path = descend(block, x, states=True)
    assert last.dtype == path.states.dtype == jnp.bfloat16
    assert path.energies.total.dtype == jnp.float32


# ------------------------------------------------------------------------------------
# one scan


def test_scan_rematerialized_and_unrolled_are_the_same_in_values_and_gradients(x64):
    "As the loop that they stand for: test_compiled.py, nbs/07_dynamics.ipynb."
    rng = np.random.default_rng(3)
    graphdef, state = nnx.split(blocks.block_of(beta=nnx.Param(0.4)))
    x, v = blocks.tokens(2, 4, 6), rng.normal(size=(2, 4, 6))
    w, mask = rng.normal(size=(2, 4, 2)), rng.random((2, 4, 4)) < 0.6

    def run(state, x, **variant):
        "A loss of the last state and of every energy on the way, and all of them."
        block, given = nnx.merge(graphdef, state), dict(states=True, mask=mask)
        last, path = descend(block, x, 3, 0.3, **given, **variant)
        parts = [jnp.vdot(v, last), *map(jnp.vdot, w, path.energies.values())]
        return sum(parts), (last, path)

    both = lambda **variant: jax.jit(
        jax.value_and_grad(partial(run, **variant), (0, 1), has_aux=True)
    )(state, x)
    expected = both()
    assert all(np.any(leaf) for leaf in jax.tree.leaves(expected[1]))
    for variant in (dict(unroll=True), dict(remat=True, unroll=2)):
        close = partial(assert_close, rtol=1e-12, atol=1e-12)
        jax.tree.map(close, both(**variant), expected)


def test_a_trajectory_has_both_ends_and_the_papers_defaults(x64):
    block, x = blocks.block_of(), blocks.tokens(2, 2, 4, 6)
    last, path = descend(block, x, 0, states=True)
    total = path.energies["attention"] + path.energies["memory"]
    np.testing.assert_array_equal(path.energies.total, total)
    np.testing.assert_array_equal([*path.states, last], [x, x])
    assert descend(block, x, 0)[1].states is None
    assert_close(descend(block, x)[0], descend(block, x, 12, 0.1)[0], rtol=1e-12)
    assert_close(block(x), block.norm(descend(block, x)[0]))


def test_nothing_is_stored_or_computed_that_nobody_asked_for(x64):
    block, x = blocks.block_of(K=64), blocks.tokens(2, 4, 6)
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
