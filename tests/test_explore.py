"""The explorers: what they show is what the models say, every dial is heard, nothing is
compiled twice, and pages stand by themselves.
"""

import ast
import base64
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import xml.dom.minidom
import zlib
from dataclasses import replace
from datetime import datetime
from html.parser import HTMLParser
from importlib.resources import files
from io import BytesIO
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import examples
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from et_nbdev import _explorer_views, explore
from et_nbdev.attention import EnergyAttention
from et_nbdev.block import Block, EnergyTransformer
from et_nbdev.dynamics import Euler, descend
from et_nbdev.energy import Energies, Energy, Scaled
from et_nbdev.explore import (
    _LONGEST,
    _SHORT,
    ExplorerSettings,
    GraphExplorer,
    ImageExplorer,
    _dialed,
    _neighborhood,
    _read_picture,
    animate_graph,
    animate_image,
    descend_graph,
    descend_picture,
)
from et_nbdev.graph.anomaly import AnomalyConfig, AnomalyEnergyTransformer
from et_nbdev.graph.data import Graph
from et_nbdev.graph.energy import attention_weights
from et_nbdev.graph.nodes import scaled
from et_nbdev.norm import EnergyLayerNorm
from et_nbdev.solvers import Anderson, Backtracking, solve
from et_nbdev.testing import assert_close
from et_nbdev.vision.data import patchify
from et_nbdev.vision.model import ImageConfig, ImageEnergyTransformer
from et_nbdev.vision.model import image_model as _image_model

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("compile_quickly")
SIZES = dict(
    image_size=8,
    patch_size=2,
    dim=12,
    num_heads=2,
    head_dim=4,
    num_memories=16,
    steps=5,
    step_size=0.3,
)


@pytest.fixture(scope="module")
def model():
    return ImageEnergyTransformer(ImageConfig(channels=3, **SIZES), rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def photos():
    return dict(
        zip(
            "abc",
            np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8),
        )
    )


@pytest.fixture(scope="module")
def explorer(model, photos):
    return ImageExplorer(model, photos)


@pytest.fixture(scope="module")
def graph():
    "Two rings and a chord, one node alone."
    a = np.arange(9)
    pairs = np.unique(
        np.sort(np.r_[np.c_[a, (a + 1) % 9], np.c_[a, (a + 2) % 9], [[0, 5]]], 1),
        axis=0,
    )
    rng = np.random.default_rng(0)
    return Graph(
        *np.r_[pairs, pairs[:, ::-1]].T,
        rng.normal(size=(10, 4)),
        np.r_[1, -1, np.zeros(8, int)],
        name="rings",
    )


@pytest.fixture(scope="module")
def net():
    return AnomalyEnergyTransformer(
        5,
        AnomalyConfig(
            dim=8,
            num_heads=2,
            head_dim=4,
            num_memories=8,
            hidden=8,
            steps=2,
            step_size=0.5,
        ),
        rngs=nnx.Rngs(0),
    )


@pytest.fixture(scope="module")
def walker(net, graph):
    return GraphExplorer(net, graph)


@pytest.fixture
def traces(monkeypatch):
    """Calls of the solver from Python: it is called when a program is made, not when it
    runs.
    """
    made = []
    monkeypatch.setattr(
        explore, "solve", lambda *a, **k: made.append(1) or solve(*a, **k)
    )
    return made


def by_hand(model, photo, occluded, alpha, b, attention, memory, steps):
    "The descent written out, from the model's parts."
    c, block = model.config, model.block
    g_patches = patchify(
        (photo / np.float32(255) - 0.5) / np.float32(0.5), c.patch_size
    )[None]
    x = model.encode(jnp.asarray(g_patches), jnp.asarray(occluded)[None])[0]
    hot = EnergyTransformer(
        c.dim,
        c.num_heads,
        c.head_dim,
        c.num_memories,
        beta=b * c.head_dim**-0.5,
        rngs=nnx.Rngs(0),
    ).attention
    hot.Wq[...], hot.Wk[...] = block.attention.Wq[...], block.attention.Wk[...]
    look = jax.jit(
        lambda x: (
            hot.energy_and_update(block.norm(x)),
            block.memory.energy_and_update(block.norm(x)),
            model.decode(x),
        )
    )
    rows = []
    for _ in range(steps + 1):
        (e_att, pull), (e_hn, recall), read = jax.tree.map(np.asarray, look(x))
        pull, recall = float(attention) * pull, float(memory) * recall
        rows.append(
            (
                float(attention) * e_att,
                float(memory) * e_hn,
                np.linalg.norm(pull, axis=-1),
                np.linalg.norm(recall, axis=-1),
                read,
            )
        )
        x = x + np.float32(alpha) * (pull + recall)
    return [np.stack(column) for column in zip(*rows)]


# ------------------------------------------------------------------------------------
# the numbers


@pytest.mark.parametrize("learn_beta", [False, True])
def test_dials_make_an_energy_whose_gradient_is_the_update(x64, learn_beta):
    block = EnergyTransformer(
        6,
        2,
        4,
        8,
        beta=[0.3, 0.9],
        learn_beta=learn_beta,
        param_dtype=jnp.float64,
        rngs=nnx.Rngs(0),
    )

    @jax.jit
    def look(g, beta, attention, memory):
        turned = _dialed(block, beta, dict(attention=attention, memory=memory))
        slope = jax.grad(lambda g: turned.energy(g))(g)
        return *turned.energies_and_update(g), slope, turned.attention.term.beta

    g = block.norm(jax.random.normal(jax.random.key(0), (3, 6)))
    own, force = block.energies_and_update(g)
    for w_att, w_hn in ((1.0, 1.0), (0.3, 0.0), (0.0, 0.6), (0.3, 0.6)):
        energies, update, slope, beta = look(g, 2.0, w_att, w_hn)
        assert_close(update, -slope)
        assert_close(energies["memory"], w_hn * own["memory"])
        assert_close(beta, jnp.array([0.6, 1.8]))
        assert (energies["attention"] == 0) == (w_att == 0)
    energies, update, *_ = look(g, 1.0, 1.0, 1.0)
    jax.tree.map(assert_close, (energies, update), (own, force))
    assert_close(block.attention.beta, jnp.array([0.3, 0.9]))  # the model is left alone


class Apart(Energy):
    "A user's term with automatic update, which is no sum over tokens."

    def energy(self, g):
        return jnp.sum(jnp.mean(g, -2) ** 2, -1) / 2


class Sharp(Energy):
    "A user's term with an update by hand."

    def __init__(self):
        self.beta = nnx.Param(jnp.array(0.8))

    def token_energy(self, g):
        return self.beta[...] * jnp.sum(jnp.cos(g), -1)

    def energy_and_update(self, g):
        return self.energy(g), self.beta[...] * jnp.sin(g)


def with_own_terms(block):
    "The block and two terms, one of which is named like a dial."
    return Block(block.norm, **block.terms, apart=Apart(), alpha=Sharp())


def test_terms_of_a_users_own_are_weighed_in_energy_gradient_and_descent(x64):
    block = EnergyTransformer(6, 2, 4, 8, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    block = with_own_terms(block)
    weights = dict(attention=0.7, memory=1.3, apart=1.9, alpha=0.4)
    x = jax.random.normal(jax.random.key(0), (2, 3, 5, 6))  # two batch axes, 5 tokens
    numbers = 0.2, 1.6, weights

    @jax.jit
    def look(x, numbers):
        turned, states, energies = explore._descend(block, x, numbers, "Euler", 4)
        g = turned.norm(states)
        slope = jax.grad(lambda g: turned.energy(g).sum())(g)
        return states, energies, slope, turned.updates(g), block.energies(g)

    states, energies, slope, updates, own = look(x, numbers)
    assert list(energies) == ["attention", "memory", "apart", "alpha"]
    assert slope.dtype == jnp.float64 and energies.total.shape == (5, 2, 3)
    assert_close(sum(updates.values()), -slope)
    assert_close(jnp.diff(states, axis=0), -0.2 * slope[:-1])
    for name in ("memory", "apart", "alpha"):  # β changes the attention itself
        assert_close(energies[name], weights[name] * own[name])
    # every term counts: its dial changes the gradient by its own update
    for name, update in updates.items():
        more = _dialed(block, 1.6, weights | {name: 2 * weights[name]})
        assert_close(more.update(block.norm(x)), update[0] - slope[0])
        assert np.abs(update).max() > 1e-2


def test_every_head_hears_the_dial_of_beta(x64):
    "Under whatever name, in whatever wrapper, and once if two terms are one."
    heads = [
        EnergyAttention(6, 2, 4, param_dtype=jnp.float64, rngs=nnx.Rngs(i))
        for i in range(2)
    ]
    norm = EnergyLayerNorm(6, param_dtype=jnp.float64)
    block = Block(norm, near=heads[0], far=Scaled(heads[1], 0.5), again=heads[0])
    turned = _dialed(block, 3.0)
    assert_close(turned.near.term.beta, 3 * heads[0].beta)
    assert_close(turned.far.term.term.beta, 3 * heads[1].beta)
    assert turned.again.term is turned.near.term


def test_a_users_term_has_its_dial_its_map_and_its_curve(model, photos):
    own = nnx.clone(model)
    own.block = with_own_terms(own.block)
    explorer = ImageExplorer(own, photos)
    assert list(explorer.weights) == ["attention", "memory", "apart", "alpha"]
    assert [d.description for d in explorer.weights.values()] == list(explorer.weights)
    before = explorer.view.value
    assert before.count("<img") == 2 + 4 and before.count("<polyline") == 1 + 4
    explorer.weights["apart"].value = 0.0
    assert explorer.view.value != before and explorer.alpha.value == 0.3
    assert (explorer.path.pulls["apart"] == 0).all()
    settings = replace(explorer.settings, weights={"apart": 2.0})
    explorer.set(settings)
    assert [d.value for d in explorer.weights.values()] == [1, 1, 2, 1]
    want = descend_picture(own, photos["a"], explorer.occluded, settings)
    jax.tree.map(np.testing.assert_array_equal, explorer.path, want)
    assert "apart" in explorer.message.value
    explorer.reset.click()
    assert explorer.view.value == before


def test_a_users_term_on_a_graph(net, graph):
    own = nnx.clone(net)
    own.blocks = nnx.List([with_own_terms(net.blocks[0])])
    walker = GraphExplorer(own, graph)
    assert list(walker.weights) == ["attention", "memory", "apart", "alpha"]
    path = walker.path
    for name, share in path.shares.items():
        assert_close(share.sum(1), path.energies[name], rtol=1e-4, atol=1e-4)
    assert set(path.pulls) - set(path.shares) == {"apart"}
    assert "apart left out: no sum over nodes" in walker.view.value
    walker.weights["alpha"].value = 0.0
    assert (walker.path.shares["alpha"] == 0).all()
    assert walker.path.energies.total[0] != path.energies.total[0]


@pytest.mark.parametrize(
    "attention, memory", [(True, True), (False, True), (True, False), (False, False)]
)
def test_an_image_path_is_the_descent_written_out(model, photos, attention, memory):
    occluded = np.arange(16) % 3 == 0
    path = descend_picture(
        model,
        photos["a"],
        occluded,
        ExplorerSettings(0.4, 1.7, 6, weights=dict(attention=attention, memory=memory)),
    )
    e_att, e_hn, pull, recall, read = by_hand(
        model, photos["a"], occluded, 0.4, 1.7, attention, memory, 6
    )
    for mine, theirs in (
        (path.energies["attention"], e_att),
        (path.energies["memory"], e_hn),
        (path.pulls["attention"], pull),
        (path.pulls["memory"], recall),
    ):
        assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    tokens = np.clip(0.5 + 0.5 * read, 0, 1)
    assert_close(patchify(path.tokens, 2), tokens, atol=1e-4)
    shown = patchify(path.completed, 2)
    given = patchify(photos["a"][None] / np.float32(255), 2)
    np.testing.assert_array_equal(
        shown[:, ~occluded],
        np.broadcast_to(given[:, ~occluded], shown[:, ~occluded].shape),
    )
    assert_close(shown[:, occluded], tokens[:, occluded], atol=1e-4)
    assert path.completed.shape == (7, 8, 8, 3) and path.pulls["memory"].shape == (
        7,
        16,
    )
    for name, weight in (("attention", attention), ("memory", memory)):
        if not weight:
            assert (path.pulls[name] == 0).all() and (path.energies[name] == 0).all()


def test_the_solver_is_the_one_that_is_named(model, photos):
    assert explore._SOLVERS == {
        "Euler": Euler,
        "backtracking": Backtracking,
        "Anderson": Anderson,
    }
    occluded = np.arange(16) < 7
    euler, backtracking, anderson = (
        descend_picture(
            model, photos["b"], occluded, ExplorerSettings(5.0, steps=9, solver=name)
        ).energies.total
        for name in explore._SOLVERS
    )
    assert_close(backtracking[0], euler[0], rtol=1e-6)
    # refused, or the very same step
    assert (
        backtracking[1] == backtracking[0] or abs(backtracking[1] / euler[1] - 1) < 1e-5
    )
    for guarded in (backtracking, anderson):
        assert (np.diff(guarded) <= 1e-5 * np.abs(guarded).max()).all()
    for one, other in (
        (euler, backtracking),
        (euler, anderson),
        (backtracking, anderson),
    ):
        assert np.abs(one / other - 1).max() > 1e-3


def test_hidden_pixels_are_not_looked_at_and_without_attention_nobody_is(model, photos):
    occluded, settings = np.arange(16) % 2 == 0, ExplorerSettings(0.4, steps=4)
    mask = np.repeat(np.repeat(occluded.reshape(4, 4), 2, 0), 2, 1)[..., None]
    garbage = np.where(mask, photos["b"], photos["a"])
    others = np.where(mask, photos["a"], photos["b"])
    jax.tree.map(
        np.testing.assert_array_equal,
        descend_picture(model, photos["a"], occluded, settings),
        descend_picture(model, garbage, occluded, settings),
    )
    shown = lambda photo, **change: patchify(
        descend_picture(model, photo, occluded, replace(settings, **change)).tokens, 2
    )[-1][occluded]
    assert np.abs(shown(photos["a"]) - shown(others)).max() > 1e-3
    assert_close(
        shown(photos["a"], weights={"attention": 0}),
        shown(others, weights={"attention": 0}),
        atol=1e-6,
    )


def test_an_energy_that_is_not_finite_is_not_said_to_fall():
    for wrong in (np.nan, np.inf):
        said = explore._says(Energies(a=np.array([1.0, 0.5, wrong])), 0)
        assert "not finite" in said and "never" not in said


def test_a_graph_path_is_what_the_model_says(net, graph):
    features, edges, block = scaled(graph), net.prepare(graph), net.blocks[0]

    @jax.jit
    def own(features):
        trajectory = descend(
            block, net.encode(features), 2, 0.5, edges=edges[0], states=True
        )[1]
        g = block.norm(trajectory.states[1])
        return (
            trajectory.energies,
            block.attention.token_energy(g, edges=edges[0]),
            -jnp.sum(block.memory.hidden(g) ** 2, -1) / 2,
            block.attention.update(g, edges=edges[0]),
            block.memory.update(g),
            attention_weights(block.attention, g, edges[0]),
            jax.nn.softmax(net(features, edges))[:, 1],
        )

    path = descend_graph(net, features, edges, ExplorerSettings(0.5, steps=2))
    energies, attention, memory, pull, recall, weights, p = jax.tree.map(
        np.asarray, own(jnp.asarray(features))
    )
    for name, mine in path.shares.items():
        assert_close(path.energies[name], energies[name], rtol=1e-4)
        assert_close(mine.sum(1), energies[name], rtol=1e-4)
    assert_close(path.p[-1], p, rtol=1e-4)
    for mine, theirs in (
        (path.shares["attention"], attention),
        (path.shares["memory"], memory),
        (path.pulls["attention"], np.linalg.norm(pull, axis=-1)),
        (path.pulls["memory"], np.linalg.norm(recall, axis=-1)),
        (path.weights, weights.mean(-1)),
    ):
        assert_close(mine[1], theirs, rtol=1e-4, atol=1e-5)
    off = descend_graph(
        net, features, edges, ExplorerSettings(0.5, steps=2, weights={"attention": 0})
    )
    assert (
        (off.weights == 0).all()
        and (off.pulls["attention"] == 0).all()
        and (off.shares["attention"] == 0).all()
        and (off.pulls["memory"] > 0).all()
    )


@pytest.mark.parametrize("left_out", ["num_heads", "num_memories"])
def test_a_model_with_one_term_is_shown_and_has_one_dial(photos, left_out):
    small = ImageConfig(channels=3, **{**SIZES, left_out: 0})
    model = ImageEnergyTransformer(small, rngs=nnx.Rngs(0))
    path = descend_picture(
        model, photos["a"], np.arange(16) % 3 == 0, ExplorerSettings(steps=3)
    )
    (name,) = path.energies
    assert (name == "attention") == (left_out == "num_memories")
    assert path.pulls[name].shape == (4, 16) and (path.pulls[name] > 0).all()
    assert list(path.pulls) == list(ImageExplorer(model, photos).weights) == [name]
    said = animate_image(
        model, photos["a"], np.arange(16) % 3 == 0, ExplorerSettings(steps=3)
    )
    assert "E never rises" in said


def test_a_graph_without_memories_is_shown(graph, net):
    bare = AnomalyEnergyTransformer(
        5, replace(net.config, num_memories=0), rngs=nnx.Rngs(0)
    )
    path = descend_graph(
        bare, scaled(graph), bare.prepare(graph), ExplorerSettings(0.5, steps=2)
    )
    assert list(path.shares) == list(path.pulls) == ["attention"]
    assert_close(
        path.shares["attention"].sum(1), path.energies.total, rtol=1e-4, atol=1e-4
    )


def test_a_model_in_a_field_descends_in_its_field(photos):
    sys.path.insert(0, str(ROOT / "scripts"))
    from image_dynamics import FieldModel

    model = FieldModel(ImageConfig(channels=3, **SIZES), rngs=nnx.Rngs(0))
    occluded = np.arange(16) % 3 == 0
    path = descend_picture(model, photos["a"], occluded, ExplorerSettings(0.3, steps=5))
    patches = patchify((photos["a"] / np.float32(255) - 0.5) / np.float32(0.5), 2)
    energies = model.descend(jnp.asarray(patches)[None], jnp.asarray(occluded)[None])[1]
    for name, e in energies.energies.items():
        assert_close(path.energies[name], e[:, 0], rtol=1e-4, atol=1e-4)


def test_no_turn_of_a_dial_makes_a_new_program(model, photos, net, graph, traces):
    rng = np.random.default_rng(1)

    def turn(solver, longest):
        return ExplorerSettings(
            float(rng.uniform(0.1, 2)),
            float(rng.uniform(0.2, 4)),
            int(rng.integers(0, longest + 1)),
            solver,
            dict(attention=float(rng.integers(2)), memory=float(rng.uniform(0, 2))),
        )

    for solver in explore._SOLVERS:
        descend_picture(
            model, photos["a"], np.zeros(16, bool), ExplorerSettings(solver=solver)
        )
    edges, features = net.prepare(graph), scaled(graph)
    descend_graph(net, features, edges, ExplorerSettings(steps=1))
    del traces[:]
    for solver in explore._SOLVERS:
        for _ in range(4):
            descend_picture(
                model, photos["c"], rng.random(16) < 0.5, turn(solver, _LONGEST)
            )
    for _ in range(4):
        descend_graph(net, features, edges, turn("Euler", _SHORT))
    assert traces == []
    descend_picture(model, photos["a"], np.zeros(16, bool), ExplorerSettings(steps=3))
    other = ImageEnergyTransformer(
        ImageConfig(channels=3, **{**SIZES, "dim": 10}), rngs=nnx.Rngs(0)
    )
    descend_picture(other, photos["a"], np.zeros(16, bool), ExplorerSettings(steps=3))
    assert traces == [1]  # the witness: another model does


# ------------------------------------------------------------------------------------
# the instruments


def test_what_the_image_explorer_shows_is_the_path_of_its_settings(explorer, model):
    explorer.reset.click()
    assert explorer.settings == ExplorerSettings(
        0.3, 1.0, 5, "Euler", dict(attention=1.0, memory=1.0)
    )

    def holds():
        want = descend_picture(
            model,
            explorer.pictures[explorer.picture.value],
            explorer.occluded,
            explorer.settings,
        )
        jax.tree.map(np.testing.assert_array_equal, explorer.path, want)
        total = float(want.energies.total[explorer.t.value])
        assert (
            f"t = {explorer.t.value} of {explorer.steps.value}: E ="
            f" {_explorer_views._number(total)}," in explorer.message.value
        )

    holds()
    for name, value in (
        ("alpha", 0.5),
        ("beta", 2.0),
        ("steps", 9),
        ("t", 4),
        ("solver", "backtracking"),
        ("attention", 0.0),
        ("attention", 1.0),
        ("memory", 0.4),
        ("picture", "b"),
        ("steps", 3),
    ):
        before = explorer.view.value
        dial = explorer.weights.get(name) or getattr(explorer, name)
        dial.value = value
        assert explorer.view.value != before, name
        holds()
    assert explorer.t.value == explorer.t.max == 3  # cut off at T
    explorer.reset.click()
    explorer.picture.value = "a"
    # which was the end, and follows it
    assert explorer.settings.alpha == 0.3 and explorer.t.value == 5
    holds()


def test_a_click_hides_a_patch_and_one_computation_serves_many(explorer, monkeypatch):
    explorer.clear.click()
    assert not explorer.occluded.any()
    bare = explorer.path
    explorer.patches[6].value = True
    assert explorer.occluded.nonzero()[0].tolist() == [6]
    assert (
        np.abs(explorer.path.completed - bare.completed)[:, 2:4, 4:6].max() > 1e-3
        and (explorer.path.energies.total != bare.energies.total).all()
    )
    # other patches are open still
    np.testing.assert_array_equal(explorer.path.completed[:, :2], bare.completed[:, :2])
    calls = []
    monkeypatch.setattr(
        explore, "descend_picture", lambda *a: calls.append(1) or descend_picture(*a)
    )
    explorer.random.click()
    assert explorer.occluded.sum() == 8 and len(calls) == 1
    first = explorer.occluded
    explorer.random.click()
    assert (explorer.occluded != first).any() and len(calls) == 2
    explorer.t.value = 1
    explorer.steps.value = 7
    assert len(calls) == 2  # time is a matter of looking
    explorer.reset.click()
    assert len(calls) == 3
    with pytest.raises(ValueError, match=r"occluded: .*\(16,\), got bool\(9,\)"):
        explorer.hide(np.zeros(9, bool))


def test_the_message_says_what_is_wrong_what_takes_long_and_when_nothing_moves(
    explorer,
):
    explorer.reset.click()
    shown, said = explorer.view.value, []
    explorer.alpha.value = np.nan
    assert (
        'role="alert"' in explorer.message.value
        and "alpha: expected a positive, finite number, got nan"
        in explorer.message.value
        and explorer.view.value == shown
    )
    explorer.reset.click()
    assert "alert" not in explorer.message.value
    for dial in explorer.weights.values():
        dial.value = 0
    assert re.search(
        r"E = 0, of which attention 0 and memory 0; there is nothing to descend",
        explorer.message.value,
    )
    explorer._compiled.discard("Anderson")  # as before its first use
    explorer.message.observe(lambda change: said.append(change.new), "value")
    for _ in range(2):
        explorer.solver.value = "Anderson"
        explorer.solver.value = "Euler"
    explorer.message.unobserve_all()
    assert (
        sum("Compiling Anderson" in words for words in said) == 1 and "t = " in said[-1]
    )
    explorer.reset.click()


def stored(kind="png", size=(12, 9), mode="RGB"):
    stream = BytesIO()
    Image.effect_noise(size, 80).convert(mode).save(stream, kind)
    return stream.getvalue()


def handed(content, name="mine.png"):
    "As the browser hands a file over."
    return (
        {
            "name": name,
            "type": "image/png",
            "size": len(content),
            "content": memoryview(content),
            "last_modified": datetime(2024, 1, 1),
        },
    )


def test_an_upload_is_shown_and_a_bad_one_changes_nothing(explorer):
    explorer.picture.value = "a"
    content = stored()
    for name, junk in (
        ("text.png", b"hello"),
        ("cut.png", content[:60]),
        ("<b>.gif", b"GIF89a" + content),
        ("empty", b""),
    ):
        before = (
            explorer.picture.value,
            explorer.picture.options,
            explorer.path,
            explorer.view.value,
            sorted(explorer.pictures),
        )
        explorer.upload.value = handed(junk, name)
        assert (
            "was not taken" in explorer.message.value
            and 'role="alert"' in explorer.message.value
            and "<b>.gif" not in explorer.message.value
        )
        after = (
            explorer.picture.value,
            explorer.picture.options,
            explorer.path,
            explorer.view.value,
            sorted(explorer.pictures),
        )
        jax.tree.map(np.testing.assert_array_equal, before[2], after[2])
        assert before[:2] + before[3:] == after[:2] + after[3:]
    seen, base = explorer.path, explorer.base.value
    for content in (stored(), stored("jpeg")):
        explorer.upload.value = handed(content)
        assert explorer.picture.value == "mine.png (yours)"
        np.testing.assert_array_equal(
            explorer.pictures["mine.png (yours)"], _read_picture(content, 8)
        )
        assert (
            explorer.base.value != base
            and (explorer.path.energies.total != seen.energies.total).any()
        )
        seen, base = explorer.path, explorer.base.value
    explorer.picture.value = "a"


def test_a_graph_explorer_walks(walker, net, graph, traces):
    walker.reset.click()
    senders, receivers = walker.edges[0].edge_list()

    def holds():
        want = descend_graph(net, scaled(graph), net.prepare(graph), walker.settings)
        jax.tree.map(np.testing.assert_array_equal, walker.path, want)
        assert (
            f"Node {walker.node.value} (" in walker.message.value
            and f"anomalous {want.p[walker.t.value, walker.node.value]:.3f};"
            in walker.message.value
        )
        assert sorted(walker.near.nodes) == sorted(
            senders[receivers == walker.node.value]
        )
        assert sorted(b for _, b in walker.walk.options[1:]) == sorted(
            walker.near.nodes
        )
        assert walker.walk.label == "a neighbor …"

    holds()
    for name, value in (
        ("node", 3),
        ("t", 0),
        ("alpha", 1.0),
        ("beta", 0.5),
        ("memory", 0.0),
        ("attention", 0.0),
        ("steps", 4),
        ("node", 1),
        ("node", 9),
    ):
        before = walker.view.value
        dial = walker.weights.get(name) or getattr(walker, name)
        dial.value = value
        assert walker.view.value != before, name
        holds()
    assert traces == [] and len(walker.near.nodes) == 0  # the lonely one
    walker.anomalous.click()
    assert walker.node.value == 0
    walker.walk.value = 5
    assert walker.node.value == 5 and walker.near.node == 5
    walker.normal.click()
    assert graph.labels[walker.node.value] == 0
    walker.reset.click()


def test_neighbors_are_those_of_the_edge_list(graph, net):
    senders, receivers = net.prepare(graph)[0].edge_list()
    for node in range(10):
        near = _neighborhood(senders, receivers, node, 10)
        assert (receivers[near.edges] == node).all() and (
            senders[near.edges] == near.nodes
        ).all()
        assert len(near.nodes) == (receivers == node).sum()
        assert_close(np.linalg.norm(near.places, axis=-1), np.ones(len(near.nodes)))
        linked = {frozenset((near.nodes[i], near.nodes[j])) for i, j in near.links}
        assert linked == {
            frozenset((int(a), int(b)))
            for a, b in zip(senders, receivers)
            if a in near.nodes and b in near.nodes
        }
    with pytest.raises(ValueError, match="node: .* from 0 to 9, got 10"):
        _neighborhood(senders, receivers, 10, 10)


# ------------------------------------------------------------------------------------
# the pages


class Page(HTMLParser):
    """What a page holds: tags with their attributes, and whether they close as they
    open.
    """

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("img", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.mark.parametrize("kind", ["image", "graph"])
def test_a_page_needs_nothing_else(kind, model, photos, net, graph):
    occluded, settings = np.arange(16) % 2 == 0, ExplorerSettings(0.3, steps=4)
    pictures = np.random.default_rng(0).random((10, 4, 2))
    made = (
        animate_image(model, photos["a"], occluded, settings)
        if kind == "image"
        else animate_graph(net, graph, 0, settings, pictures)
    )
    again = (
        animate_image(model, photos["a"], occluded, settings)
        if kind == "image"
        else animate_graph(net, graph, 0, settings, pictures)
    )
    assert made == again and len(made) < 300_000
    page = Page(made)
    assert not re.search(
        r"https?:|//cdn|@import|src=\"(?!data:)|href=\"(?!data:)", made
    )
    frames = [attrs for attrs in page.all("div") if attrs.get("class") == "et-frame"]
    # without scripts the end is shown
    assert len(frames) == 5 and ["hidden" in f for f in frames] == [True] * 4 + [False]
    assert all(f"t = {t} of 4" in f["data-says"] for t, f in enumerate(frames))
    (slider,) = page.all("input")
    assert (
        slider["type"] == "range"
        and slider["max"] == "4"
        and slider["value"] == "4"
        and slider["aria-label"]
        and slider["aria-valuetext"] == frames[-1]["data-says"]
    )
    assert page.all("button") == [{"type": "button"}] and "Play" in page.text
    assert all(attrs["alt"] for attrs in page.all("img")) and all(
        attrs["role"] == "img" and attrs["aria-label"] for attrs in page.all("svg")
    )
    (key,) = {attrs["id"] for attrs in page.all("div") if "id" in attrs}
    assert f'getElementById("{key}")' in made
    for svg in re.findall(r"<svg.*?</svg>", made, re.S):
        xml.dom.minidom.parseString(svg)
    for data in re.findall(r"data:image/png;base64,([^\"]+)", made):
        Image.open(BytesIO(base64.b64decode(data))).verify()


def test_the_pictures_of_a_page_are_those_of_the_path(model, photos):
    occluded, settings = np.arange(16) % 2 == 0, ExplorerSettings(0.3, steps=2)
    path = descend_picture(model, photos["a"], occluded, settings)
    given, *frames = [
        np.asarray(
            Image.open(BytesIO(base64.b64decode(attrs["src"].partition(",")[2])))
        )
        for attrs in Page(animate_image(model, photos["a"], occluded, settings)).all(
            "img"
        )
    ]
    hidden = np.repeat(np.repeat(occluded.reshape(4, 4), 2, 0), 2, 1)
    np.testing.assert_array_equal(given[~hidden], photos["a"][~hidden])
    assert (given[hidden] == given[hidden][0]).all()
    for t in range(3):
        completed, attention, memory, tokens = frames[4 * t : 4 * t + 4]
        np.testing.assert_array_equal(
            completed, np.round(255 * path.completed[t]).astype(np.uint8)
        )
        np.testing.assert_array_equal(
            tokens, np.round(255 * path.tokens[t]).astype(np.uint8)
        )
        for shades, name in ((attention, "attention"), (memory, "memory")):
            sizes = path.pulls[name][t]
            # the larger the darker
            assert (
                np.diff(shades.reshape(16, 3)[np.argsort(sizes)].astype(int).sum(1))
                <= 0
            ).all()
            # each map from white to nearly black
            assert (
                shades.reshape(16, 3)[sizes.argmin()] == 255
            ).all() and shades.reshape(16, 3)[sizes.argmax()].sum() < 200


# ------------------------------------------------------------------------------------
# misuse


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(alpha=0.0), "alpha: expected a positive"),
        (dict(alpha=np.nan), "alpha"),
        (dict(beta=-1.0), "beta: .* got -1.0"),
        (dict(beta=np.inf), "beta"),
        (dict(steps=-1), "steps"),
        (dict(steps=2.5), "steps"),
        (
            dict(steps=_LONGEST + 1),
            f"steps: expected at most {_LONGEST}, got {_LONGEST + 1}",
        ),
        (dict(solver="Newton"), "solver: .* got 'Newton'"),
        (dict(alpha="a"), "alpha: .* got 'a'"),
        (dict(beta=None), "beta: .* got None"),
        (dict(solver=["Euler"]), r"solver: .* got \['Euler'\]"),
        (dict(weights=0.3), "weights: .* by the name of each term, got 0.3"),
        (dict(weights={"memory": "no"}), "weights: .* for 'memory', got 'no'"),
        (dict(weights={"apart": np.nan}), "weights: .* for 'apart', got nan"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        ExplorerSettings(**wrong)


def test_arguments_that_do_not_fit_are_named(model, photos, net, graph):
    everything, features, edges = np.zeros(16, bool), scaled(graph), net.prepare(graph)
    for error, words, call in [
        (
            TypeError,
            "image: expected uint8 pixels, got float64",
            lambda: descend_picture(
                model, photos["a"] / 255, everything, ExplorerSettings()
            ),
        ),
        (
            ValueError,
            r"image: expected \(S, S, C\) = \(8, 8, 3\), got \(4, 8, 3\)",
            lambda: descend_picture(
                model, photos["a"][:4], everything, ExplorerSettings()
            ),
        ),
        (
            ValueError,
            r"occluded: expected booleans \(N,\) = \(16,\), got int64\(16,\)",
            lambda: descend_picture(
                model, photos["a"], np.zeros(16, int), ExplorerSettings()
            ),
        ),
        (
            TypeError,
            "model: .* got ImageTransformer",
            lambda: descend_picture(
                _image_model(
                    ImageConfig(channels=3, block="transformer", **SIZES),
                    rngs=nnx.Rngs(0),
                ),
                photos["a"],
                everything,
                ExplorerSettings(),
            ),
        ),
        (TypeError, "model", lambda: ImageExplorer(net)),
        (
            ValueError,
            "weights: the block has no term 'apart'; its terms are attention, memory",
            lambda: descend_picture(
                model, photos["a"], everything, ExplorerSettings(weights={"apart": 1})
            ),
        ),
        (
            ValueError,
            "weights: the block has no term 'apart'",
            lambda: descend_graph(
                net, features, edges, ExplorerSettings(steps=2, weights={"apart": 1})
            ),
        ),
        (
            ValueError,
            "weights: the block has no term 'apart'",
            lambda: ImageExplorer(model, photos).set(
                ExplorerSettings(weights={"apart": 1})
            ),
        ),
        (
            ValueError,
            r"pictures: .* got float64\(8, 8, 3\) for 'half'",
            lambda: ImageExplorer(model, {"half": photos["a"] / 255}),
        ),
        (
            TypeError,
            "settings: expected ExplorerSettings, got NoneType",
            lambda: descend_picture(model, photos["a"], everything, None),
        ),
        (
            TypeError,
            "settings: expected ExplorerSettings, got dict",
            lambda: descend_graph(net, features, edges, {}),
        ),
        (
            TypeError,
            "pictures: expected a dict of named pictures, got list",
            lambda: ImageExplorer(model, [photos["a"]]),
        ),
        *[
            (
                ValueError,
                f"size: .* got {size}",
                lambda size=size: _read_picture(stored(), size),
            )
            for size in (0, -1, 2.5)
        ],
        (
            ValueError,
            r"channels: expected 1 \(gray\) or 3 \(colors\), got 2",
            lambda: _read_picture(stored(), 8, 2),
        ),
        (
            ValueError,
            "pictures: expected at least one",
            lambda: ImageExplorer(model, {}),
        ),
        (
            ValueError,
            r"features: .* F = 5, got \(10, 3\)",
            lambda: descend_graph(
                net, features[:, :3], edges, ExplorerSettings(steps=2)
            ),
        ),
        (
            ValueError,
            f"steps: expected at most {_SHORT} on a graph",
            lambda: descend_graph(
                net, features, edges, ExplorerSettings(steps=_SHORT + 1)
            ),
        ),
        (
            ValueError,
            "one block",
            lambda: descend_graph(
                AnomalyEnergyTransformer(5, net.config, kinds=2, rngs=nnx.Rngs(0)),
                features,
                edges * 2,
                ExplorerSettings(steps=2),
            ),
        ),
        (
            ValueError,
            "got 0 heads",
            lambda: descend_graph(
                AnomalyEnergyTransformer(
                    5, replace(net.config, num_heads=0), rngs=nnx.Rngs(0)
                ),
                features,
                edges,
                ExplorerSettings(steps=2),
            ),
        ),
        (
            ValueError,
            "pictures: .* with N = 10, got",
            lambda: animate_graph(
                net, graph, 0, ExplorerSettings(steps=1), np.zeros((9, 2, 2))
            ),
        ),
        (
            TypeError,
            "content: expected the bytes of a file, got str",
            lambda: _read_picture("a.png", 8),
        ),
    ]:
        with pytest.raises(error, match=words):
            call()


def test_files_of_all_sorts_become_pictures_of_one():
    for kind, mode in (
        ("png", "RGB"),
        ("png", "L"),
        ("png", "RGBA"),
        ("png", "P"),
        ("jpeg", "RGB"),
        ("jpeg", "L"),
        ("jpeg", "CMYK"),
    ):
        for channels in (1, 3):
            picture = _read_picture(stored(kind, mode=mode), 8, channels)
            assert (
                picture.shape == (8, 8, channels)
                and picture.dtype == np.uint8
                and picture.std() > 0
            )
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = 255
    stream = BytesIO()
    Image.fromarray(wide).save(stream, "png")
    assert (_read_picture(stream.getvalue(), 10) == 255).all()  # the middle, cut square


def test_files_too_large_are_refused_before_they_are_unpacked(monkeypatch):
    stream = BytesIO()
    Image.new("1", (9000, 9000)).save(stream, "png")
    assert len(stream.getvalue()) < 100_000
    monkeypatch.setattr(explore, "_decode", lambda *a: pytest.fail("it was decoded"))
    with pytest.raises(
        ValueError, match="^content: .*9000 × 9000 pixels are more than 50,000,000"
    ):
        _read_picture(stream.getvalue(), 8)
    with pytest.raises(ValueError, match="at most 20,000,000 bytes"):
        _read_picture(b"\xff\xd8\xff" + bytes(20_000_000), 8)


def test_other_formats_and_any_failure_of_a_decoder_are_value_errors(monkeypatch):
    for kind in ("gif", "bmp", "tiff", "webp"):
        with pytest.raises(ValueError, match="content: expected a PNG or JPEG"):
            _read_picture(stored(kind), 8)
    for error in (
        SyntaxError("broken"),
        zlib.error("broken"),
        struct.error("broken"),
        IndexError("broken"),
        Image.DecompressionBombError("broken"),
    ):

        def fail(*_):
            raise error

        monkeypatch.setattr(explore, "_decode", fail)
        with pytest.raises(ValueError, match="content: .*broken"):
            _read_picture(stored(), 8)


@examples(100)
@given(st.sampled_from([stored(), stored("jpeg")]), st.data())
def test_damaged_files_end_in_one_kind_of_error(whole, data):
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(
            st.integers(0, 255)
        )
    try:
        assert _read_picture(
            bytes(content[: data.draw(st.integers(0, len(content)))]), 8
        ).shape == (8, 8, 3)
    except ValueError as e:
        assert str(e).startswith("content: ")


# ------------------------------------------------------------------------------------
# the house


def test_importing_it_imports_no_front_end():
    "What its own imports import is looked at in test_project."
    statements = [
        node
        for node in ast.parse(Path(explore.__file__).read_text(encoding="utf-8")).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    names = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in statements
        for alias in node.names
    }
    assert "jax" in names and not {name.partition(".")[0] for name in names} & {
        "ipywidgets",
        "IPython",
        "matplotlib",
        "networkx",
        "PIL",
    }


def test_the_notebook_keeps_pages_and_no_widgets():
    """A widget without its kernel is an error message; the three pages are what a
    reader without one sees.
    """
    notebook = json.loads((ROOT / "nbs/50_explorer.ipynb").read_text(encoding="utf-8"))
    data = [
        output.get("data", {})
        for cell in notebook["cells"]
        for output in cell.get("outputs", [])
    ]
    assert (
        not any("widget" in kind for d in data for kind in d)
        and "widgets" not in notebook["metadata"]
    ), "clear the outputs of the cells that say eval: false"
    pages = ["".join(d["text/html"]) for d in data if "text/html" in d]
    assert len(pages) == 3 and all(
        "et-frame" in page and len(page) < 300_000 for page in pages
    )


# ------------------------------------------------------------------------------------
# the files of the pages


FOLDER = files("et_nbdev") / "explorer"


def test_the_files_of_the_pages_are_in_the_package():
    "That they are in the wheel is looked at in test_project."
    names = {path.name for path in FOLDER.iterdir()}
    assert {"page.html", "page.css", "page.js", "touch.css", "touch.js"} <= names
    found = _explorer_views.__file__, explore.__file__
    used = re.findall(
        r"\"([\w-]+\.(?:html|css|js))\"|'([\w-]+\.(?:html|css|js))'",
        "".join(Path(path).read_text(encoding="utf-8") for path in found),
    )
    assert {a or b for a, b in used} == names
    for name in names:
        text = _explorer_views._file(name)
        assert text.endswith("\n") and not re.search(r"https?:|@import", text)


def test_no_script_or_style_is_written_in_a_notebook():
    for path in sorted((ROOT / "nbs").glob("*explorer*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                source = "".join(cell["source"])
                assert not re.search(
                    r"addEventListener|querySelector|=> \{|display: *(flex|block)",
                    source,
                ), f"{path.name}: {cell['id']}"


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
@pytest.mark.parametrize(
    "name", sorted(p.name for p in FOLDER.iterdir() if p.name.endswith(".js"))
)
def test_scripts_can_be_parsed(name):
    run = subprocess.run(
        ["node", "--check", str(FOLDER / name)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


# ------------------------------------------------------------------------------------
# in a real browser


@pytest.fixture(scope="module")
def browser():
    sync = pytest.importorskip("playwright.sync_api").sync_playwright
    names = os.environ.get("CHROME") or "chromium", "chromium-browser", "google-chrome"
    chrome = next(filter(None, map(shutil.which, names)), None)
    if chrome is None:
        pytest.skip("needs a Chromium, on the PATH or named by CHROME")
    with sync() as play:
        browser = play.chromium.launch(executable_path=chrome, chromium_sandbox=False)
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_is_moved_through(browser, width, scheme, model, photos, net, graph):
    occluded, settings = np.arange(16) % 2 == 0, ExplorerSettings(0.3, steps=4)
    made = (
        animate_image(model, photos["a"], occluded, settings),
        animate_graph(net, graph, 0, settings),
    )
    size = dict(width=width, height=900)
    tab = browser.new_page(viewport=size, color_scheme=scheme)
    faults = []
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.set_content(
        "<!doctype html><meta name=viewport content='width=device-width'>"
        "<meta name=color-scheme content='light dark'>" + "".join(made)
    )
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    for page in tab.locator("[role=group]").all():
        seen = page.locator(".et-frame:not([hidden])")
        slider, says = page.locator("input"), page.locator("output")
        at = lambda t: (
            seen.count() == 1
            and f"t = {t} of 4" in says.inner_text()
            and slider.input_value() == str(t)
            and slider.get_attribute("aria-valuetext") == says.inner_text()
            and seen.get_attribute("data-says") == says.inner_text()
        )
        assert at(4)
        slider.press("ArrowLeft")
        assert at(3)
        slider.fill("0")
        assert at(0)
        play = page.locator("button")
        play.click()
        assert play.inner_text() == "Pause"
        seen.locator("xpath=self::*[contains(@data-says, 't = 1 of')]").wait_for()
        play.click()
        assert play.inner_text() == "Play"
    assert faults == []
    tab.close()


def test_drawing_across_patches_presses_them(browser):
    "Buttons as ipywidgets makes them; a click on one turns it."
    tab = browser.new_page(viewport=dict(width=400, height=300))
    buttons = "".join(
        '<button class="et-patch jupyter-button" style="width:50px;height:50px"'
        " onclick=\"this.classList.toggle('mod-active')\"></button>"
        for _ in range(4)
    )
    script = _explorer_views._file("touch.js")
    tab.set_content(
        f"<body style='margin:0'><div style='display:flex'>{buttons}</div>"
        f"{_explorer_views._style('touch.css')}<script>{script}</script>"
    )
    pressed = lambda: tab.evaluate(
        "[...document.querySelectorAll('button')]"
        ".map(b => b.classList.contains('mod-active'))"
    )

    def draw(start, end):
        tab.mouse.move(start, 25)
        tab.mouse.down()
        tab.mouse.move(end, 25, steps=12)
        tab.mouse.up()

    tab.mouse.click(25, 25)
    assert pressed() == [True, False, False, False]
    draw(75, 175)  # starts on a shown patch: hides
    assert pressed() == [True, True, True, True]
    draw(25, 125)  # starts on a hidden one: shows
    assert pressed() == [False, False, False, True]
    tab.close()
