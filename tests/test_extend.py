"""What a user of the library does: terms and solvers of his own, in a few lines."""

from dataclasses import dataclass

import doors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev import (
    Anderson,
    Backtracking,
    Block,
    Energy,
    EnergyAttention,
    EnergyLayerNorm,
    Euler,
    ExternalField,
    HopfieldMemory,
    SignedMemory,
    assert_descends,
    assert_gradient,
    descend,
    equilibrium,
    solve,
)
from et_nbdev.dynamics import plot_energies
from et_nbdev.energy import Scaled
from et_nbdev.graph.energy import EdgeAttention, EdgeIndex
from et_nbdev.solvers import Flow, LearnedEuler, LearnedMetric, Schedule
from et_nbdev.testing import assert_close
from et_nbdev.training import CheckpointError
from et_nbdev.vision.model import (
    ImageConfig,
    ImageEnergyTransformer,
    load_model,
    save_model,
)

pytestmark = pytest.mark.usefixtures("compile_quickly")


# ------------------------------------------------------------------------------------
# terms that the library does not have


class ConvolutionalMemory(Energy):
    "Memories of three neighboring tokens on a ring."

    def __init__(self, dim, num_memories, *, rngs, param_dtype=jnp.float32):
        init = nnx.initializers.normal((3 * dim) ** -0.5)
        self.xi = nnx.Param(init(rngs.params(), (num_memories, 3 * dim), param_dtype))

    def token_energy(self, g):
        around = [jnp.roll(g, shift, -2) for shift in (1, 0, -1)]
        a = jnp.concatenate(around, -1) @ self.xi[...].T
        return -jnp.sum(jax.nn.relu(a) ** 2, -1) / 2


class Alibi(EnergyAttention):
    "Attention whose scores fall with the distance between two tokens of a sequence."

    def distances(self, g):
        at = jnp.arange(g.shape[-2], dtype=g.dtype)
        slope = 2.0 ** -jnp.arange(1, self.num_heads + 1, dtype=g.dtype)
        return -slope[:, None, None] * jnp.abs(at[:, None] - at[None, :])[None]

    def token_energy(self, g):
        return super().token_energy(g, bias=self.distances(g))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeavyBall:
    "A solver of one's own."

    step_size: float = 0.05
    momentum: float = 0.3

    def init(self, look, x):
        return x, jnp.zeros_like(x)

    def step(self, look, state):
        x, v = state
        view = look(x)
        v = self.momentum * v + self.step_size * view.update
        return (x + v, v), view


D, H, Y, K, N = 6, 2, 5, 7, 4


def parts(seed=0):
    options = dict(rngs=nnx.Rngs(seed), param_dtype=jnp.float64)
    return options, {
        "attention": EnergyAttention(D, H, Y, **options),
        "normalized": EnergyAttention(D, H, Y, normalize=True, **options),
        "alibi": Alibi(D, H, Y, **options),
        "memory": HopfieldMemory(D, K, **options),
        "signed": SignedMemory(D, K, **options),
        "convolution": ConvolutionalMemory(D, K, **options),
        "scaled": Scaled(HopfieldMemory(D, K, **options), 0.5),
        "field": ExternalField(),
    }


def block_of(*names, seed=0):
    options, terms = parts(seed)
    norm = EnergyLayerNorm(D, param_dtype=jnp.float64)
    norm.delta[...] = jax.random.normal(jax.random.key(seed), (D,))
    if "signed" in names:
        thresholds = terms["signed"].threshold
        thresholds[...] = jax.random.normal(jax.random.key(1), (K,))
    return Block(norm, **{name: terms[name] for name in names})


def tokens(seed=2, batch=3):
    return jax.random.normal(jax.random.key(seed), (batch, N, D))


def metric(steps, step_size, map_per_step=False, param_dtype=jnp.float32):
    "Steps whose sizes differ from channel to channel, some of them by much."
    solver = LearnedMetric(steps, D, step_size, map_per_step, param_dtype=param_dtype)
    for seed, w in enumerate((solver.c, solver.W)):
        w[...] = 2 * jax.random.normal(jax.random.key(seed), w.shape, param_dtype)
    return solver


EVERY = ("normalized", "signed", "scaled", "field", "alibi", "convolution")
SOLVERS = {
    "Euler": Euler(0.02),
    "one per sample": Euler([0.01, 0.02, 0.03]),
    "Schedule": Schedule([0.02, 0.01]),
    "LearnedEuler": LearnedEuler(4, 0.03),
    "LearnedMetric": metric(4, 0.03),
    "one map a step": metric(4, 0.03, map_per_step=True),
    "Backtracking": Backtracking(0.02),
    "Anderson": Anderson(0.02),
    "Flow": Flow(step_size=0.02),
    "a user's": HeavyBall(0.01, 0.2),
}


@pytest.mark.core
def test_the_update_of_a_mixed_block_is_its_gradient(x64):
    block, x = block_of(*EVERY), tokens()
    g, field = block.norm(x), 0.3 * jnp.ones_like(x)
    energies, update = jax.jit(block.energies_and_update)(g, field=field)
    assert_gradient(jax.jit(lambda g: block.energy(g, field=field)), g, -update)
    assert tuple(energies) == EVERY
    # every term has its share
    updates = jax.jit(block.updates)(g, field=field)
    assert all(jnp.abs(u).max() > 1e-2 for u in updates.values())
    assert_close(sum(updates.values()), update)


@pytest.mark.parametrize("name", SOLVERS)
def test_every_term_descends_under_every_solver(x64, name):
    block, x, solver = block_of(*EVERY), tokens(), SOLVERS[name]
    field, cost = 0.3 * jnp.ones_like(x), getattr(solver, "cost", 1)

    @jax.jit
    def run(x, solver, field):
        options = dict(states=True, field=field)
        last, path = descend(block, x, 6, solver=solver, **options)
        found = solve(block, x, solver, evaluations=7 * cost, **options)
        # what is reported is the energy of the states that are reported
        energy = lambda x: block.energy(block.norm(x), field=field)
        return last, path, found, jax.lax.map(energy, path.states)

    last, path, found, seen = run(x, solver, field)
    assert_descends(path.energies.total)
    assert path.states.shape == (7, *x.shape)
    assert_close(path.states[-1], last)
    assert_close(path.energies.total, seen, rtol=1e-10)
    assert_close(found.energies.total[cost - 1 :: cost], path.energies.total)
    assert_close(found.states[cost - 1 :: cost], path.states)
    assert found.certificate.holds.all()


# ------------------------------------------------------------------------------------
# what shows a descent


def test_the_plot_of_a_trajectory_has_a_panel_for_every_term(x64):
    pytest.importorskip("matplotlib").use("Agg")
    x = jax.random.normal(jax.random.key(0), (2, 3, N, D))
    names = ["signed", "alibi", "convolution"]
    energies = descend(block_of(*names), x, 3)[1].energies
    # a batch of batches, a batch, one sample
    for batch, lines in ((), 5), ((0,), 3), ((0, 0), 1):
        own = jax.tree.map(lambda e: e[:, *batch], energies)
        axes = plot_energies(own, max_lines=5).axes
        assert [ax.get_title() for ax in axes] == ["$E$", *names]
        for ax, e in zip(axes, (own.total, *own.values())):
            shown = np.stack([line.get_ydata() for line in ax.lines], -1)
            np.testing.assert_allclose(shown, np.reshape(e, (4, -1))[:, :lines])


# positions that the library does not have


class Apart(nnx.Module):
    "A bias that falls with the squared distance of two tokens."

    def __init__(self, factor):
        self.factor = nnx.Param(jnp.asarray(factor))

    def __call__(self, coordinates):
        apart = coordinates[..., :, None, :] - coordinates[..., None, :, :]
        return -jnp.einsum("h,...cbz->...hcb", self.factor[...], apart**2)


# ------------------------------------------------------------------------------------
# what a class inherits, and what must not get lost on the way


class Half(Energy):
    "A term around another, which it hands everything."

    def __init__(self, term):
        self.terms = nnx.List([term])

    def energy(self, g, **context):
        return self.terms[0].energy(g, **context) / 2


class Outer(Half):
    "Its term sees no mask."

    def energy(self, g):
        return super().energy(g)


class Dial(Scaled):
    def energy(self, g, dial=1.0, **context):
        return dial * super().energy(g, **context)


class Biased(EnergyAttention):
    def token_energy(self, g, **context):
        return super().token_energy(g, bias=jnp.zeros((1, N, N)), **context)


class Leaning(EnergyAttention):
    "A head leans towards where a token is."

    def token_energy(self, g, coordinates):
        return super().token_energy(g) - coordinates[..., 0]


def test_context_reaches_the_terms_that_name_it_and_those_inside(x64):
    make = lambda kind: kind(D, H, Y, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    plain, g, mask = make(EnergyAttention), tokens(), jnp.tri(N, k=-1, dtype=bool)
    z = jnp.broadcast_to(jnp.arange(N)[:, None] / 7, (*g.shape[:-1], 1))
    terms = dict(plain=plain, biased=make(Biased), half=Half(plain))
    terms |= dict(dial=Dial(plain, 0.5), outer=Scaled(Outer(plain), 2.0))
    terms |= dict(leaning=make(Leaning))
    pairs = {"mask", "weights", "bias"}
    takes = [pairs, pairs, pairs, pairs | {"dial"}, set(), {"coordinates"}]
    assert [term.takes for term in terms.values()] == takes
    block = Block(EnergyLayerNorm(D, param_dtype=jnp.float64), **terms)
    E = block.energies(g, mask=mask, dial=3.0, coordinates=z)
    seen, unseen = plain.energy(g, mask=mask), plain.energy(g)
    assert (jnp.abs(seen - unseen) > 1e-3).all()
    moved = unseen - z.sum((-2, -1))
    wanted = [seen, seen, seen / 2, 1.5 * seen, unseen, moved]
    for e, own in zip(E.values(), wanted, strict=True):
        assert_close(e, own)
    u = block.updates(g, mask=mask, dial=3.0, coordinates=z)
    assert_close(u["dial"], 1.5 * plain.update(g, mask=mask))
    for run in (block.energy, lambda g, **c: descend(block, g, **c)):
        with pytest.raises(TypeError, match="^mass: no term of this block takes it"):
            run(g, mass=mask)


def whole(self, g):
    return jnp.sum(g**2, (-2, -1))


def test_a_class_says_its_energy_and_what_it_takes():
    with pytest.raises(TypeError, match="^Kind: expected a method energy"):
        type("Kind", (Energy,), {})
    kind = type("Kind", (EnergyAttention,), dict(energy=whole))
    assert kind(D, H, Y, rngs=nnx.Rngs(0)).takes == set()  # not what it inherits


class Student(Block):
    "A block that has more than terms."

    def __init__(self, memory):
        self.memory = memory  # before the block knows its terms
        super().__init__(EnergyLayerNorm(D), memory=memory)
        self._teacher = HopfieldMemory(D, K, rngs=nnx.Rngs(1))


def test_what_a_block_is_made_of_is_checked():
    memory, norm = HopfieldMemory(D, K, rngs=nnx.Rngs(0)), EnergyLayerNorm(D)
    student = Student(memory)
    assert list(student.terms) == ["memory"]
    student.memory = HopfieldMemory(D, K, rngs=nnx.Rngs(3))  # in its place: fine
    vague = type("Vague", (Energy,), dict(energy=lambda self, g: jnp.sum(g)))()
    other, ones = nnx.LayerNorm(D, rngs=nnx.Rngs(0)), jnp.ones((3, N, D))
    each = r"own: .*one energy per sample \(3,\).*, got \(\)"
    for make, error, match in (
        (lambda: Block(norm), ValueError, "terms: expected at least one"),
        (lambda: Block(norm, energy=memory), ValueError, "energy: the name is taken"),
        (lambda: Block(norm, total=memory), ValueError, "total: the name is taken"),
        (lambda: Block(norm, memory=norm), TypeError, "memory: expected an Energy"),
        (lambda: Block(other, memory=memory), TypeError, "norm: expected a module"),
        (lambda: Block(norm, own=vague).energies(ones), ValueError, each),
        (lambda: setattr(student, "late", memory), AttributeError, "late: .*memory;"),
    ):
        with pytest.raises(error, match=f"^{match}"):
            make()


def test_positions_that_do_not_fit_are_refused():
    "Those of edges are in test_graph_energy.py."
    g, z = tokens().astype(jnp.float32), jnp.zeros((N, 2))
    near = EdgeAttention(D, H, Y, positions=Apart([0.25] * H), rngs=nnx.Rngs(0))
    for given in (z[1:], jnp.zeros((2, N, 2))):
        with pytest.raises(ValueError, match=r"positions: .*3, 2, 4, 4.* got .+"):
            near.energy(g, coordinates=given)
    with pytest.raises(ValueError, match="^edges: .*positions of pairs"):
        near.energy(g, edges=EdgeIndex([0], [1], N), coordinates=z)


class RMSNorm(EnergyLayerNorm):
    "A norm that keeps the mean."

    def __call__(self, x):
        square = jnp.mean(x**2, -1, keepdims=True)
        return self.gamma * x / jnp.sqrt(square + self.eps)


def test_another_norm_descends_and_is_judged_by_its_derivative(x64):
    memory = HopfieldMemory(D, K, "softmax", param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    x = tokens()

    block = Block(RMSNorm(D, param_dtype=jnp.float64), memory=memory)
    assert_descends(descend(block, x, 20)[1].energies.total)
    found = solve(block, x, Backtracking(), evaluations=60)  # by its derivative
    assert found.certificate.holds.all() and jnp.isfinite(found.residual).all()
    with pytest.raises(TypeError, match="^block: the derivative is known for"):
        equilibrium(block, x)


@pytest.mark.parametrize("solver", [Euler(), Backtracking(), Anderson(), Flow()])
def test_derivatives_of_a_descent_are_finite(x64, solver):
    "Beside a sample that is all zeros, too; and they are those of differences."
    block = block_of("attention", "memory")
    x = tokens(batch=2).at[0].set(0.0)

    @jax.jit
    def loss(block, x):
        return (block.norm(descend(block, x, 3, solver=solver)[0])[1] ** 3).sum()

    slopes = jax.grad(loss)(block, x)
    assert all(jnp.isfinite(a).all() for a in jax.tree.leaves(slopes))
    direction = tokens(5, 2).at[0].set(0.0)
    slope = jax.grad(lambda t: loss(block, x + t * direction))(0.0)
    h = 1e-5
    ends = (loss(block, x + t * direction) for t in (h, -h))
    assert_close(slope, jnp.subtract(*ends) / (2 * h), rtol=1e-5)


def test_numpy_tokens_in_double_precision_are_cast_before_they_are_judged():
    block = Block(
        EnergyLayerNorm(D), memory=HopfieldMemory(D, K, "softmax", rngs=nnx.Rngs(0))
    )
    x = np.random.default_rng(0).normal(size=(3, N, D))
    with doors.unchecked():
        found = equilibrium(block, x)[1]
    assert found.x.dtype == jnp.float32 and found.settled.all()


def test_the_cost_of_a_solver_may_be_a_field():
    @jax.tree_util.register_dataclass
    @dataclass(frozen=True)
    class Twice(Euler):
        cost: int = 2

        def step(self, look, x):
            half = x + self.step_size / 2 * look(x).update
            return x + self.step_size * look(half).update, look(x)

    block = Block(EnergyLayerNorm(D), memory=HopfieldMemory(D, K, rngs=nnx.Rngs(0)))
    x = tokens().astype(jnp.float32)
    assert solve(block, x, Twice(0.1), evaluations=6).evaluations.max() == 6


def test_what_is_no_block_is_named():
    for run in (descend, solve):
        with pytest.raises(TypeError, match="^block: expected a Block, .*got int"):
            run(3, tokens().astype(jnp.float32))


def test_a_model_with_a_term_of_its_own_is_not_read_without_it(tmp_path):
    sizes = dict(image_size=6, patch_size=2, dim=D, num_heads=H, head_dim=Y)
    model = ImageEnergyTransformer(ImageConfig(**sizes), rngs=nnx.Rngs(0))
    own = ConvolutionalMemory(D, K, rngs=nnx.Rngs(2))
    model.block = Block(model.block.norm, **model.block.terms, own=own)
    save_model(tmp_path / "own.safetensors", model)
    with pytest.raises(CheckpointError, match="holds 'params.block.own.xi', too"):
        load_model(tmp_path / "own.safetensors")
