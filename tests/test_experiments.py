"""Variants of models, as experiments/ trains them: a ladder from the transformer to the
Energy Transformer, and other terms in the energies of graphs.
"""

import json
from dataclasses import replace

import graph_terms
import image_broken
import image_ladder as ladder
import image_pair as pair
import jax
import jax.numpy as jnp
import numpy as np
import puzzle
import pytest
import runs
import set_terms
from flax import nnx

from et_nbdev.block import Block, EnergyTransformer
from et_nbdev.energy import Energies
from et_nbdev.graph.anomaly import AnomalyConfig
from et_nbdev.graph.classify import WeightedEdges
from et_nbdev.graph.energy import EdgeIndex
from et_nbdev.testing import assert_close, assert_gradient
from et_nbdev.vision.model import ImageConfig, TransformerBlock, image_model

pytestmark = pytest.mark.usefixtures("compile_quickly")
TINY = dict(image_size=8, patch_size=2, dim=12, num_heads=2, head_dim=4)
CONFIG = ImageConfig(**TINY, num_memories=16, steps=2, step_size=1.0)


def rung(name, **changes):
    "A block in double precision, with all parameters moved off their start."
    design = ladder.Design(name, **changes)
    block = ladder.Block(CONFIG, design, rngs=nnx.Rngs(0))
    leaves, tree = jax.tree.flatten(nnx.state(block, nnx.Param))
    random = np.random.default_rng(0)
    moved = [np.asarray(x) + 0.1 * random.normal(size=x.shape) for x in leaves]
    nnx.update(block, jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in moved]))
    return block


def tokens():
    return jnp.asarray(np.random.default_rng(1).normal(size=(2, 16, 12)))


def transformer_of(block):
    "The library's block with the weights of rung 0."
    c = CONFIG
    sizes = c.dim, c.num_heads, c.head_dim, c.num_memories
    made = TransformerBlock(*sizes, rngs=nnx.Rngs(0))
    made.norm1, made.norm2 = block.norm, block.norm2
    for letter, name in dict(q="query", k="key", v="value").items():
        layer = getattr(made.attention, name)
        layer.kernel = nnx.Param(getattr(block, f"W{letter}")[...].swapaxes(0, 1))
        layer.bias = nnx.Param(getattr(block, f"b{letter}")[:, 0])
    made.attention.out.kernel = nnx.Param(block.Wo[...].swapaxes(1, 2))
    made.attention.out.bias = block.bo
    made.up.kernel, made.up.bias = nnx.Param(block.W1[...].T), block.b1
    made.down.kernel, made.down.bias = block.W2, block.b2
    return made


def test_both_ends_of_the_ladder_are_the_blocks_of_the_library(x64):
    x = tokens()
    with jax.numpy_rank_promotion("allow"):
        # flax takes the softmax in single precision, whatever it is given
        first, last = rung("transformer"), rung("key term")
        run = lambda block: jax.jit(lambda x: block(x))(x)
        assert_close(run(first), run(transformer_of(first)), rtol=1e-6)
        c = CONFIG
        sizes = c.dim, c.num_heads, c.head_dim, c.num_memories
        library = EnergyTransformer(*sizes, rngs=nnx.Rngs(0))
        library.norm, library.memory.xi = last.norm, last.W1
        library.attention.Wq, library.attention.Wk = last.Wq, last.Wk
        step = lambda x: x + library.update(library.norm(x))
        assert_close(run(last), run(step), rtol=1e-12)
        block = rung("key term", relative="distance")

        def energy(g):  # with relative positions, too, a rung's update is −∂E/∂g
            lse = jax.nn.logsumexp(block.scores(*block.queries_and_keys(g)), -1)
            r = jax.nn.relu(jnp.einsum("...nd,kd->...nk", g, block.W1[...]))
            return -2 * lse.sum((-2, -1)) - 0.5 * (r**2).sum((-2, -1))

        g = block.norm(x)
        update = jax.jit(lambda g: block.attention(g) + block.mlp(g))(g)
        assert_gradient(jax.jit(energy), g, -update)
    for kind, name in (("transformer", "transformer"), ("plain", "key term")):
        design = ladder.Design(name)
        size = replace(ladder.sized(pair.Plan().base, design), recipe=kind)
        model = nnx.eval_shape(lambda size=size: image_model(size, rngs=nnx.Rngs(0)))
        assert ladder.operations(size, design) == model.flops


@pytest.mark.parametrize(
    "below, above, ties",
    [
        ("parallel halves", "no biases", {}),
        ("tied MLP", "tied values", dict(Wv="Wk", Wo="Wq")),
    ],
)
def test_a_tied_rung_is_a_special_case_of_the_one_below(x64, below, above, ties):
    x, below, above = tokens(), rung(below), rung(above)
    for name in ("Wq", "Wk", "Wv", "Wo", "W1", "W2"):
        if hasattr(below, name):
            getattr(below, name)[...] = getattr(above, ties.get(name, name))[...]
    for name in ("bq", "bk", "bv", "bo", "b1", "b2"):
        if hasattr(below, name) and not ties:
            getattr(below, name)[...] = jnp.zeros_like(getattr(below, name)[...])
    below.norm = above.norm
    assert_close(below(x), above(x), rtol=1e-12)
    assert not any(hasattr(above, name) for name in ties)


def test_all_designs_start_alike_and_cost_the_same():
    base, designs = pair.Plan().base, ladder.designs().values()
    sizes = [ladder.sized(base, design) for design in designs]
    assert len(sizes) == 17
    assert {c.num_memories for c in sizes} == {480, 512, 576}
    assert len(set(map(ladder.operations, sizes, designs))) == 1
    first, *others = [
        ladder.Model(ladder.sized(CONFIG, design), design, rngs=nnx.Rngs(3))
        for design in map(ladder.Design, ladder.RUNGS)
    ]
    start = dict(nnx.to_flat_state(nnx.state(first)))
    for model in others:
        for path, leaf in nnx.to_flat_state(nnx.state(model)):
            tied = model.design.has("tied values") and path[-1] == "Wk"
            same = start.get(("block", "Wq") if tied else path)
            if same is not None and same.shape == leaf.shape:
                np.testing.assert_array_equal(leaf[...], same[...], err_msg=path[-1])


def test_a_run_is_scored_on_the_way_and_at_its_end(monkeypatch):
    monkeypatch.setitem(pair.SIZES, "tiny", CONFIG)
    monkeypatch.setitem(pair.DATA, "generated", (8, 2))
    draw = np.random.default_rng(0).integers
    images = {s: draw(0, 256, (8, 8, 8, 3), np.uint8) for s in ("train", "validation")}
    plan = pair.Plan("tiny", "generated", batch_size=4, trial_steps=4)
    row = ladder.run(plan, ladder.designs()["7-key-term-zero"], 1, images)
    seen = [r["validation"] for r in row["curve"] if "validation" in r]
    assert len(seen) == 2 and row["validation_mse"] == seen[1] != seen[0]
    assert row["config"]["optim"]["lr"] == 0.008 and row["config"]["seed"] == 1


def test_a_comparison_makes_what_is_not_there(monkeypatch, tmp_path, capsys):
    argv = ["x", "--out", str(tmp_path), "--seeds", "0", "1", "--only", "b"]
    monkeypatch.setattr("sys.argv", argv)
    (tmp_path / "d-b-1.json").write_text("{}")
    run = lambda data, variant, seed: {"made": [data, variant, seed]}
    runs.compare("", "x", run, lambda row: f"made {row['made']}", "de", "ab", [0])
    assert {p.name for p in tmp_path.iterdir()} == {"d-b-0.json", "d-b-1.json"}
    row = json.loads((tmp_path / "d-b-0.json").read_text())
    assert row["made"] == ["d", "b", 0] and row["commit"] and row["date"]
    assert "made ['d', 'b', 0]" in capsys.readouterr().out


def a_graph(rng, N=9):
    upper = np.triu(rng.random((N, N)) < 0.4, 1)
    return EdgeIndex(*np.nonzero(upper | upper.T), N)


@pytest.mark.parametrize(
    "variant",
    ["as-found", "normalized-heads", "signs", "both", "edge-sum", "beside-edge-sum"],
)
def test_every_variant_on_graphs_descends_its_energy(x64, variant):
    assert variant in graph_terms.VARIANTS
    rng = np.random.default_rng(1)
    c = AnomalyConfig(dim=6, num_heads=2, head_dim=4, num_memories=5)
    block = graph_terms.block(variant, c, nnx.Rngs(0))
    context = dict(edges=(a_graph(rng),))
    g = jnp.asarray(rng.normal(size=(9, 6)))
    total = lambda g: sum(
        term.energy(g, **{k: v for k, v in context.items() if k in term.takes})
        for term in block.terms.values()
    )
    energies, update = block.energies_and_update(g, **context)
    assert_close(energies.total, total(g))
    assert_close(update, -jax.grad(total)(g))


def a_weighted_graph(rng, N=9, H=2):
    upper = np.triu(rng.random((N, N)) < 0.4, 1)
    senders, receivers = np.nonzero(upper | upper.T)
    linked = rng.random(len(senders)) < 0.8  # the others are padding
    weights = rng.normal(size=(H, len(senders)))
    return WeightedEdges(*map(jnp.asarray, (senders, receivers, linked, weights)))


@pytest.mark.parametrize("variant", ["as-found", "both", "both-beside-edge-sum"])
def test_every_variant_on_sets_descends_its_energy(x64, variant):
    c = set_terms.FOUND | set_terms.VARIANTS[variant] | dict(dim=6, num_heads=2)
    rng = np.random.default_rng(1)
    block = set_terms.block(c, nnx.Rngs(0))
    edges = a_weighted_graph(rng)
    g = jnp.asarray(rng.normal(size=(9, 6)))
    E = lambda g: block.energies(g, edges=edges).total
    assert set(block.terms) == set(c["terms"])
    assert_close(block.update(g, edges=edges), -jax.grad(E)(g))


def test_a_variant_is_trained_on_a_fold_and_judged_by_its_hold_out(monkeypatch):
    monkeypatch.setitem(set_terms.EPOCHS, "rings", 2)
    row = set_terms.run("rings", "learned-step", 0)
    assert len(row["validation"]) == 2 and row["variant"] == "learned-step"
    assert row["best_validation_accuracy"] == max(row["validation"])
    # other classes of the test graphs change nothing
    graphs = set_terms.load_graphs("rings", None)
    fold = set_terms.deal(graphs.labels)
    other = replace(
        graphs, labels=np.where(fold == 0, 1 - graphs.labels, graphs.labels)
    )
    monkeypatch.setattr(set_terms, "deal", lambda labels: fold)
    monkeypatch.setattr(set_terms, "load_graphs", lambda *_: other)
    again = set_terms.run("rings", "learned-step", 0)
    same = ("loss", "validation")
    assert [row[name] for name in same] == [again[name] for name in same]


@pytest.mark.usefixtures("as_scripts_run")
@pytest.mark.parametrize("name", image_broken.VARIANTS)
def test_what_is_broken_of_an_energy(name):
    "Nothing broken is −∂E/∂g; with other weights of memories it is until training."
    what = image_broken.VARIANTS[name]
    parts = image_broken.recipe(CONFIG, nnx.Rngs(0), what)
    block, whole = parts.block, Block(parts.block.norm, **parts.block.terms)
    g = block.norm(jax.random.normal(jax.random.key(1), (2, 16, 12)))
    apart = jnp.abs(block.update(g) - whole.update(g)).max()
    pulls = {"key", "values", "jacobian"}
    assert apart > 0.1 if pulls & set(what) else apart < 1e-5
    assert isinstance(parts.solver, image_broken.Bare) == ("turn" in what)
    own = {"values": 2 * 2 * 12 * 4, "memory": 16 * 12}  # numbers of their own
    more = runs.parameters_of(block) - runs.parameters_of(whole)
    assert more == sum(own.get(part, 0) for part in what)


# --- puzzles


@pytest.fixture
def as_scripts_run():
    "JAX's promotion of types and shapes as it is by default."
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Said:
    "A model whose descents and answers are given: energies (T + 1, B), logits."

    def __init__(self, energies, logits):
        self.config = puzzle.PuzzleConfig(steps=len(energies) - 1)
        self.E, self.answers = jnp.asarray(energies), logits

    def descend(self, x, steps, **options):
        return 2 * x, (Energies(E=self.E), jnp.zeros((steps + 1, *x.shape)))

    def logits(self, path):
        return jnp.broadcast_to(self.answers, (*path.shape[:-1], 4))


@pytest.mark.usefixtures("as_scripts_run")
@pytest.mark.parametrize("E, what", [([1, 1], 0), ([2, 1], 1), ([1, 2], -1)])
def test_the_better_start_of_a_pair_is_to_have_the_lower_energy(E, what):
    "The first is right; what an energy that judges wrong costs."
    full = jnp.ones((2, 4, 4), int)
    boards, x = full.at[:, 0, 0].set(0), jnp.zeros((2, 16, 3))
    logits = jnp.array([[9.0, 0, 0, 0], [0.0, 9, 0, 0]])[:, None]
    model, new = Said([[3.0, 3.0], E], logits), jnp.ones(2, bool)
    plain = puzzle.loss(model, x, boards, full, new, None, None)[0]
    judged = puzzle.loss(model, x, boards, full, new, 0.0, 1.0)[0] - plain
    p = np.exp([-np.log(1 + 3 * np.exp(-9.0)), -np.log(3 + np.exp(9.0))])
    np.testing.assert_allclose(
        judged, (p[0] - p[1]) * np.log1p(np.exp(what)), rtol=1e-5
    )


@pytest.mark.usefixtures("as_scripts_run")
def test_steps_uphill_have_their_price():
    full = jnp.ones((2, 4, 4), int)
    said = [[-4.0, -4], [-2, -5], [-3, -6]]  # up by a half, and never
    args = Said(said, jnp.zeros(4)), jnp.zeros((2, 16, 3)), full * 0, full
    cost = lambda price: puzzle.loss(*args, jnp.ones(2, bool), price, 0.0)[0]
    np.testing.assert_allclose(cost(8.0) - cost(None), 8 * 0.5 / 4, rtol=1e-5)


@pytest.mark.usefixtures("as_scripts_run")
def test_a_solved_board_that_moves_has_its_price():
    "The first of two boards is right, and one more step makes its state as long again."
    full, x = jnp.ones((2, 4, 4), int), jnp.ones((2, 16, 3))
    logits = jnp.array([[9.0, 0, 0, 0], [0.0, 9, 0, 0]])[:, None]
    model = Said([[3.0, 3.0], [2.0, 2.0]], logits)
    args = model, x, full * 0, full, jnp.ones(2, bool), None, None
    cost = puzzle.loss(*args, 4.0)[0] - puzzle.loss(*args)[0]
    np.testing.assert_allclose(cost, 4.0 * 1 / 2, rtol=1e-5)


@pytest.mark.usefixtures("as_scripts_run")
def test_a_run_on_boards_goes_on_where_it_was_stopped(monkeypatch):
    monkeypatch.setitem(puzzle.SIZES, 4, puzzle.PuzzleConfig(4, 8, 2, 4, 8, 2))
    board = np.add.outer([0, 2, 1, 3], range(4))
    full = np.array([(board + shift) % 4 + 1 for shift in range(4)])
    data = dict(full=full, given=full < 2)
    begin, some, _ = puzzle.trainer(
        puzzle.PuzzleTransformer, data, 4, 6, alone=0.2, rest=1.0, **puzzle.PRICES
    )
    once, losses = some(begin(jax.random.key(0)), 6, 6)
    twice, first = some(begin(jax.random.key(0)), 6, 3)
    twice, second = some(twice, 6, 3)
    np.testing.assert_allclose(jnp.concatenate([first, second]), losses, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(once[0]), jax.tree.leaves(twice[0])):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    boards, x = once[4], once[3]
    assert (boards[::2] == boards[1::2]).all()  # pairs share a puzzle, not a start
    assert not (x[::2] == x[1::2]).all((1, 2)).any()
