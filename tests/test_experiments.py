"""Variants of models, as experiments/ trains them: with an energy that is broken on
purpose, and with other terms in the energies of graphs.
"""

import json
from dataclasses import replace

import graph_terms
import image_broken
import image_dynamics as dynamics
import image_pair as pair
import image_rest as rest
import jax
import jax.numpy as jnp
import numpy as np
import puzzle
import pytest
import runs
import set_terms
from flax import nnx

from et_nbdev.block import Block
from et_nbdev.energy import Energies
from et_nbdev.graph.anomaly import AnomalyConfig
from et_nbdev.graph.classify import WeightedEdges
from et_nbdev.graph.energy import EdgeIndex
from et_nbdev.puzzle import is_solved
from et_nbdev.testing import assert_close, assert_gradient
from et_nbdev.vision.data import normalize, occlude, patchify
from et_nbdev.vision.model import (
    ImageConfig,
    ImageEnergyTransformer,
    image_model,
    save_model,
)
from et_nbdev.vision.train import TrainConfig, completion_loss, drawn_batch

pytestmark = pytest.mark.usefixtures("compile_quickly")
TINY = dict(image_size=8, patch_size=2, dim=12, num_heads=2, head_dim=4)
CONFIG = ImageConfig(**TINY, num_memories=16, steps=2, step_size=1.0)


@pytest.fixture(autouse=True)
def as_scripts_run():
    "JAX's promotion of types and shapes as it is by default."
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_a_run_is_scored_on_the_way_and_at_its_end(monkeypatch):
    monkeypatch.setitem(pair.SIZES, "tiny", CONFIG)
    monkeypatch.setitem(pair.DATA, "generated", (8, 2))
    draw = np.random.default_rng(0).integers
    images = {s: draw(0, 256, (8, 8, 8, 3), np.uint8) for s in ("train", "validation")}
    plan = pair.Plan("tiny", "generated", batch_size=4, trial_steps=4)
    row = image_broken.run(plan, "key", 4, 0.008, 1, images)
    assert 0 < row["validation_mse"] < 9 and row["steps_observed"] == 8 * 2
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


@pytest.mark.parametrize("variant", ["as-found", "normalized-heads", "signs", "both"])
def test_every_variant_on_graphs_descends_its_energy(x64, variant):
    assert variant in graph_terms.VARIANTS
    rng = np.random.default_rng(1)
    c = AnomalyConfig(dim=6, num_heads=2, head_dim=4, num_memories=5)
    block = graph_terms.block(variant, c, nnx.Rngs(0))
    context = dict(edges=(a_graph(rng),))
    assert_gradient(block, jnp.asarray(rng.normal(size=(9, 6))), **context)


def a_weighted_graph(rng, N=9, H=2):
    upper = np.triu(rng.random((N, N)) < 0.4, 1)
    senders, receivers = np.nonzero(upper | upper.T)
    linked = rng.random(len(senders)) < 0.8  # the others are padding
    weights = rng.normal(size=(H, len(senders)))
    return WeightedEdges(*map(jnp.asarray, (senders, receivers, linked, weights)))


@pytest.mark.parametrize("variant", ["as-found", "pictures"])
def test_every_variant_on_sets_descends_its_energy(x64, variant):
    c = set_terms.FOUND | set_terms.VARIANTS[variant] | dict(dim=6, num_heads=2)
    rng = np.random.default_rng(1)
    block = set_terms.block(c, nnx.Rngs(0))
    edges = a_weighted_graph(rng)
    assert_gradient(block, jnp.asarray(rng.normal(size=(9, 6))), edges=edges)


def test_a_variant_is_trained_on_a_fold_and_judged_by_its_hold_out(monkeypatch):
    monkeypatch.setitem(set_terms.EPOCHS, "rings", 2)
    row = set_terms.run("rings", "pictures", 0)
    assert len(row["validation"]) == 2 and row["variant"] == "pictures"
    assert row["best_validation_accuracy"] == max(row["validation"])
    # other classes of the test graphs change nothing
    graphs = set_terms.load_graphs("rings", None)
    fold = set_terms.deal(graphs.labels)
    other = replace(
        graphs, labels=np.where(fold == 0, 1 - graphs.labels, graphs.labels)
    )
    monkeypatch.setattr(set_terms, "deal", lambda labels: fold)
    monkeypatch.setattr(set_terms, "load_graphs", lambda *_: other)
    again = set_terms.run("rings", "pictures", 0)
    same = ("loss", "validation")
    assert [row[name] for name in same] == [again[name] for name in same]


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
    for name, writes in {"Wo": block.attend, "up": block.remember}.items():
        if hasattr(block, name):  # a matrix that writes, and writes alone
            once, W = writes(g), getattr(block, name)
            W[...] = 2 * W[...]
            assert jnp.abs(once).max() > 0.1
            np.testing.assert_allclose(writes(g), 2 * once, rtol=1e-5, atol=1e-6)


@pytest.fixture
def learner():
    "A configuration whose model has learned steps, that model, and pictures."
    config = TrainConfig(replace(CONFIG, recipe="tiny-imagenet"), batch_size=8)
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), np.uint8)
    return config, image_model(config.model, rngs=nnx.Rngs(0)), images


def test_descents_that_are_kept_go_on_or_are_exchanged(learner):
    config, model, images = learner
    # steps that differ, and with long memories raise E
    model.solver.log_alpha[...] = jnp.log(jnp.array([1.0, 30.0]))
    model.block.memory.xi[...] *= 5
    kept = rest.Kept(model, drawn_batch(config, images[:2], jax.random.key(0)))
    patches, _, masked, x = (v[...] for v in kept.late)
    T, key = config.model.steps, jax.random.key(1)
    cost = lambda *how: rest.long_loss(config, *how)(kept, images[:8], key)
    mean = lambda told: 0.75 * told["error"] + 0.25 * told["later"]
    value, told = cost(0.0, 0.0, 0.0)
    assert_close(value, mean(told))
    assert jnp.abs(kept.late[3][...] - x).max() > 0.1
    assert_close(kept.late[3][...], model.descend(patches, masked, steps=2 * T)[0])
    value, told = cost(1.0, 2.0, 3.0)
    assert told["up"] > 0.01
    assert_close(value, mean(told) + 2 * told["moved"] + 3 * told["up"])
    new = [a[:2] for a in drawn_batch(config, images[2:8], key)]
    assert (kept.late[0][...] == new[0]).all()
    assert_close(kept.late[3][...], model.descend(new[0], new[2])[0])


def test_what_an_energy_says_beyond_what_is_known():
    known, a, b = np.random.default_rng(0).normal(size=(3, 4000))
    both = 3 * known + a, 3 * known + b
    assert np.corrcoef(*both)[0, 1] > 0.8 and abs(rest.beyond(*both, known)) < 0.05
    assert rest.beyond(a + known, np.exp(a + known) + 1e-3 * b, known) > 0.99


def test_a_model_that_is_trained_to_rest_is_followed_far(
    monkeypatch, tmp_path, learner
):
    config, model, images = learner
    split = dict(train=images, validation=images)
    monkeypatch.setattr(pair, "pictures", lambda plan, folder: split)
    monkeypatch.setattr(pair, "configured", lambda plan, job, images: config)
    came = pair.Job("et-maps-operations", 10_938, 0.023, 1)
    came = came.file(pair.Plan(weight_decay=0.0))
    save_model(tmp_path / "image-pair" / came / "best.safetensors", model)
    for name, value in dict(RUNS=tmp_path, SEEN=4, MORE=10).items():
        monkeypatch.setattr(rest, name, value)
    row = rest.run("tiny-imagenet", "rest", 1)
    assert row["pictures"] == 16 and row["steps"][-1] == 64 * config.model.steps
    assert len(row["mse"]) == len(row["steps"]) and 0 <= row["up_beyond"] <= 1
    assert rest.said_of(row).startswith(f"{row['mse'][2]:.4f} ")  # after T = 2


# --- completion whose descent runs on: its loss along the way and at its end, its scores

GRAY = TrainConfig(replace(CONFIG, channels=1, steps=3, step_size=0.5))
KEY = jax.random.key(0)


@pytest.fixture(params=[ImageEnergyTransformer, dynamics.FieldModel])
def model(request):
    return request.param(GRAY.model, rngs=nnx.Rngs(0))


def batch(n):
    "Pictures, their patches, and which of these are occluded and masked."
    c, rng = GRAY.model, np.random.default_rng(0)
    images = jnp.asarray(rng.integers(0, 256, (n, 8, 8, 1), np.uint8))
    patches = patchify(normalize(images, c.mean, c.std), c.patch_size)
    hide = jax.random.split(KEY)[0]
    share = GRAY.open_fraction
    hidden = occlude(hide, n, c.num_tokens, GRAY.num_occluded, share)
    return images, patches, *hidden


def test_the_loss_is_met_where_it_says(model):
    images, patches, occluded, masked = batch(64)
    sizes = dynamics.growing(4, 0.2)
    np.testing.assert_allclose(sizes, [0.2, 0.4, 0.8, 1.6], rtol=1e-14)
    states = dynamics.states_by(model, model.encode(patches, masked), sizes)
    at = [float(completion_loss(model.decode(x), patches, occluded)) for x in states]
    loss = lambda m, **k: dynamics.loss_at(GRAY, sizes, **k)(m, images, KEY)[0]
    value, grads = nnx.value_and_grad(loss)(model)
    np.testing.assert_allclose(value, at[4], rtol=1e-5)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads))
    assert min(at[2:]) < loss(model, first=2) < max(at[2:])
    np.testing.assert_allclose(loss(model, first=4), at[4], rtol=1e-5)


def test_errors_in_time_are_those_of_the_model_stopped_there(model):
    images, patches, occluded, _ = batch(4)
    errors, energies = dynamics.errors_in_time(model, images, occluded, 6, 2)
    for row, steps in zip(errors, (0, 2, 4, 6)):
        predicted = model(patches, occluded, steps=steps)
        assert completion_loss(predicted, patches, occluded) == pytest.approx(
            float(row.mean()), rel=1e-5
        )
    path = model.descend(patches, occluded, steps=6)[1].energies.total
    np.testing.assert_allclose(energies, path[::2], rtol=1e-5)
    sizes = (GRAY.model.step_size,) * 6
    last = dynamics.errors_after(model, images, occluded, sizes)
    np.testing.assert_allclose(last, errors[3], rtol=1e-5)
    end = dynamics.errors_settled(model, images, occluded, 0.02)
    assert end[2].all() and (end[1] <= path[-1] + 1e-5 * abs(path[-1])).all()
    assert (end[3] < 300).all() and jnp.isfinite(end[0]).all()
    early = dynamics.errors_settled(model, images, occluded, 0.02, evaluations=2)
    assert not early[2].any() and (early[3] == 2).all()


# --- puzzles


class Said:
    "A model whose descents and answers are given: energies (T + 1, B), logits."

    def __init__(self, energies, logits):
        self.config = puzzle.PuzzleConfig(steps=len(energies) - 1)
        self.E, self.answers = jnp.asarray(energies), logits

    def descend(self, x, steps, **options):
        return 2 * x, (Energies(E=self.E), jnp.zeros((steps + 1, *x.shape)))

    def logits(self, path):
        return jnp.broadcast_to(self.answers, (*path.shape[:-1], 4))


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


def test_steps_uphill_have_their_price():
    full = jnp.ones((2, 4, 4), int)
    said = [[-4.0, -4], [-2, -5], [-3, -6]]  # up by a half, and never
    args = Said(said, jnp.zeros(4)), jnp.zeros((2, 16, 3)), full * 0, full
    cost = lambda price: puzzle.loss(*args, jnp.ones(2, bool), price, 0.0)[0]
    np.testing.assert_allclose(cost(8.0) - cost(None), 8 * 0.5 / 4, rtol=1e-5)


def test_a_solved_board_that_moves_has_its_price():
    "The first of two boards is right, and one more step makes its state as long again."
    full, x = jnp.ones((2, 4, 4), int), jnp.ones((2, 16, 3))
    logits = jnp.array([[9.0, 0, 0, 0], [0.0, 9, 0, 0]])[:, None]
    model = Said([[3.0, 3.0], [2.0, 2.0]], logits)
    args = model, x, full * 0, full, jnp.ones(2, bool), None, None
    cost = puzzle.loss(*args, 4.0)[0] - puzzle.loss(*args)[0]
    np.testing.assert_allclose(cost, 4.0 * 1 / 2, rtol=1e-5)


def test_boards_of_nine_are_drawn_with_lines_and_bands_exchanged():
    "Givens go with their cells; cells of one band need not stay in one."
    base = np.arange(9)
    full = (3 * base[:, None] + base[:, None] // 3 + base) % 9 + 1
    given = full < 4
    boards, answers = puzzle.draw(jax.random.key(0), full[None], given[None], 9, 20)
    puzzles = [np.asarray(answer) for answer in answers]
    assert all(is_solved(answer) for answer in puzzles)
    assert len({(answer == answer[0, 0]).tobytes() for answer in puzzles}) > 15
    assert (boards[boards > 0] == answers[boards > 0]).all()
    for board, answer in zip(np.asarray(boards), puzzles):
        whole = [board[answer == digit].all() for digit in range(1, 10)]
        assert sum(whole) >= 3  # the digits whose cells were given, under new names


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
