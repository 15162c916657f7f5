"""What the notebook on errata lists and no other file would notice: defaults, a step of
one, and what a reported score is of.
"""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.attention import EnergyAttention
from et_nbdev.block import EnergyTransformer
from et_nbdev.dynamics import descend
from et_nbdev.graph.anomaly import (
    AnomalyConfig,
    AnomalyEnergyTransformer,
    AnomalyTraining,
    SampleConfig,
    train_anomaly,
)
from et_nbdev.graph.classify import ClassifyConfig, GraphClassifier
from et_nbdev.graph.crossval import predict_logits
from et_nbdev.graph.data import load_graph, split
from et_nbdev.graph.energy import EdgeAttention, EdgeIndex, EdgeTransformer
from et_nbdev.graph.nodes import anomaly_scores, scaled
from et_nbdev.graph.sets import learn_encoding, load_graphs, make_buckets
from et_nbdev.testing import assert_close, assert_descends
from et_nbdev.training import OptimConfig
from et_nbdev.vision.model import ImageConfig, ImageEnergyTransformer

pytestmark = pytest.mark.usefixtures("compile_quickly")
NBS = Path(__file__).resolve().parent.parent / "nbs"
QUICK = AnomalyTraining(
    model=AnomalyConfig(dim=8, head_dim=8, num_memories=8, hidden=8, dropout=0.5),
    every=2,
    optim=OptimConfig(steps=2, warmup=0, lr=1e-3, lr_floor=1e-3, weight_decay=0.0),
)


def test_nothing_attends_to_itself_unless_asked(x64):
    """Eq. (3) is the default, of the attention, of the block and of the image model;
    Eq. (12) is an option.
    """
    sizes = dict(param_dtype=jnp.float64, beta=0.7)
    g, others = np.random.default_rng(0).normal(size=(2, 4, 6)), ~np.eye(4, dtype=bool)
    plain, asked = (
        EnergyAttention(6, 2, 3, **sizes, **more, rngs=nnx.Rngs(0))
        for more in ({}, {"self_attention": True})
    )
    assert_close(plain.energy(g), asked.energy(g, mask=others), rtol=1e-12)
    assert_close(plain.update(g), asked.update(g, mask=others), rtol=1e-12)
    assert not np.allclose(plain.energy(g), asked.energy(g))
    block = EnergyTransformer(
        6,
        2,
        3,
        5,
        attention=partial(EnergyAttention, beta=sizes.pop("beta")),
        **sizes,
        rngs=nnx.Rngs(0),
    )
    assert_close(block.energies(g)["attention"], plain.energy(g), rtol=1e-12)
    tiny = dict(image_size=8, patch_size=4, dim=6, num_heads=2, head_dim=3)
    for recipe in ("plain", "paper", "waves", "tiny-imagenet"):
        config = ImageConfig(recipe, num_memories=4, **tiny)
        model = ImageEnergyTransformer(config, rngs=nnx.Rngs(0))
        assert not model.block.attention.self_attention


def repelling(num_nodes):
    "A ring of tokens that push their neighbors away."
    block = EdgeTransformer(
        4,
        1,
        4,
        2,
        attention=partial(EdgeAttention, beta=1.0),
        param_dtype=jnp.float64,
        rngs=nnx.Rngs(0),
    )
    block.attention.Wq[...] = 2 * jnp.eye(4)[None]
    block.attention.Wk[...] = -2 * jnp.eye(4)[None]
    block.memory.xi[...] = jnp.zeros((2, 4))
    a = np.arange(num_nodes)
    b = (a + 1) % num_nodes
    return block, EdgeIndex(
        np.concatenate([a, b]), np.concatenate([b, a]), num_nodes, backend="xla"
    )


def test_a_step_of_one_can_raise_the_energy_on_a_graph(x64):
    """Eq. (18) as it stands promises no descent; the same tokens with short steps
    descend.
    """
    block, edges = repelling(5)
    x = 0.1 * np.random.default_rng(0).normal(size=(5, 4))
    run = jax.jit(
        lambda x, alpha: descend(block, x, 20, alpha, edges=edges, states=True)[1]
    )
    path = run(x, 1.0)
    assert_close(
        path.states[1], x + block.update(block.norm(x), edges=edges), rtol=1e-12
    )
    with pytest.raises(AssertionError, match="energy rises"):
        assert_descends(path.energies.total)
    assert_descends(run(x, 0.001).energies.total)


def test_the_anomaly_model_takes_the_papers_step_unless_told_otherwise():
    graph = load_graph("digits-knn")
    edges, y = AnomalyEnergyTransformer.prepare(graph), jnp.asarray(scaled(graph))
    model = AnomalyEnergyTransformer(
        y.shape[1],
        replace(QUICK.model, steps=1, step_size=AnomalyConfig().step_size),
        rngs=nnx.Rngs(0),
    )

    def by_hand(model, y, edges):
        block, x = model.blocks[0], model.encode(y)
        read = jnp.concatenate(
            [
                block.norm(x),
                block.norm(x + block.update(block.norm(x), edges=edges[0])),
            ],
            -1,
        )
        return model.down(nnx.relu(model.up(read)))

    actual, expected = nnx.jit(lambda *args: (args[0](*args[1:]), by_hand(*args)))(
        model, y, edges
    )
    assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parts", [False, True])
def test_scores_are_of_every_test_node_and_of_the_model_at_rest(parts):
    """No dropout in what is reported, whatever training does, and no part of the graph
    or of its test nodes in place of all.
    """
    graph = load_graph("digits-knn")
    run = train_anomaly(
        replace(QUICK, sample=SampleConfig(40, 120, 4) if parts else SampleConfig()),
        graph,
        progress=False,
    )
    edges, y = AnomalyEnergyTransformer.prepare(graph), jnp.asarray(scaled(graph))
    p = np.asarray(
        nnx.jit(lambda model, y, edges: jax.nn.softmax(model(y, edges))[:, 1])(
            run.model, y, edges
        )
    )
    assert_close(run.p, p, rtol=1e-5)
    test = split(graph.labels, QUICK.train_fraction, QUICK.seed).test
    assert run.test == anomaly_scores(graph.labels[test], run.p[test], run.threshold)
    validation = split(graph.labels, QUICK.train_fraction, QUICK.seed).validation
    assert run.validation == anomaly_scores(
        graph.labels[validation], run.p[validation], run.threshold
    )


def test_graphs_are_evaluated_without_noise():
    """What a classifier predicts is what it would without the noise and the dropout of
    training: not even a fixed draw is left.
    """
    graphs = load_graphs("rings")[np.arange(6)]
    data = make_buckets(
        graphs, learn_encoding(graphs, np.arange(6)), k=2, num_buckets=1
    )
    noisy = ClassifyConfig(
        dim=16,
        num_heads=2,
        head_dim=8,
        num_memories=8,
        num_positions=2,
        blocks=1,
        noise=0.5,
        dropout=0.5,
    )
    ours, quiet = (
        predict_logits(
            GraphClassifier(data.num_features, 2, config, rngs=nnx.Rngs(0)),
            data,
            np.arange(6),
        )
        for config in (noisy, replace(noisy, noise=0.0, dropout=0.0))
    )
    assert_close(ours, quiet, rtol=1e-6)


PERMALINK = re.compile(r"github\.com/([\w-]+/[\w.-]+)/blob/([0-9a-f]{40})/[\w./-]+")
BY_PUBLIC_CODE = re.compile(r"\b(?:image|anomaly|classification) code\b|\bport\b")


def test_the_table_names_whose_each_mistake_is_and_tests_that_exist():
    cells = json.loads((NBS / "52_errata.ipynb").read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells)
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.M)
    assert [int(number) for number, _ in rows] == [*range(1, 21)]
    tests = NBS.parent / "tests"
    for _, row in rows:
        _, whose, right, caught = row.split(" | ")
        assert not BY_PUBLIC_CODE.search(whose) or PERMALINK.search(whose), whose
        chapters = re.findall(r"\]\(([\w/]+\.ipynb)\)", right)
        assert chapters and all((NBS / chapter).exists() for chapter in chapters)
        named = re.findall(r"`(\w+)::(\w+)`", caught)
        assert named and len(named) == caught.count("::")
        for file, name in named:
            assert f"def {name}(" in (tests / f"test_{file}.py").read_text("utf-8"), (
                name
            )
    # every commit that is linked is one of those that are listed
    sources = re.findall(r"github\.com/([\w-]+/[\w.-]+)/tree/(\w{40})", text)
    assert {*PERMALINK.findall(text)} == {*sources} and len(sources) == 6
