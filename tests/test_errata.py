"""What the notebook on errata lists and no other file would notice: defaults, and what
a reported score is of.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.attention import EnergyAttention
from et_nbdev.block import EnergyTransformer
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
from et_nbdev.graph.energy import EdgeAttention
from et_nbdev.graph.nodes import anomaly_scores, scaled
from et_nbdev.graph.sets import Supply, laplacian_positions, learn_encoding, load_graphs
from et_nbdev.testing import assert_close
from et_nbdev.training import OptimConfig
from et_nbdev.vision.model import ImageConfig, ImageEnergyTransformer

pytestmark = pytest.mark.usefixtures("compile_quickly")
NBS = Path(__file__).resolve().parent.parent / "nbs"
QUICK = AnomalyTraining(
    model=AnomalyConfig(dim=8, head_dim=8, num_memories=8, hidden=8, dropout=0.5),
    every=2,
    optim=OptimConfig(steps=2, warmup=0, lr=1e-3, lr_floor=1e-3, weight_decay=0.0),
)


def test_nothing_attends_to_itself_unless_asked():
    """Eq. (3) is the default, of the attention, of the block and of the image model;
    Eq. (12) is an option. What they compute is in test_energy.py.
    """
    sizes = dict(dim=6, num_heads=2, head_dim=3)
    made = [
        kind(**sizes, rngs=nnx.Rngs(0)) for kind in (EnergyAttention, EdgeAttention)
    ]
    made += [EnergyTransformer(6, 2, 3, 5, rngs=nnx.Rngs(0)).attention]
    for recipe in ("plain", "paper", "waves", "tiny-imagenet"):
        config = ImageConfig(recipe, 8, patch_size=4, num_memories=4, **sizes)
        made += [ImageEnergyTransformer(config, rngs=nnx.Rngs(0)).block.attention]
    assert not any(attention.self_attention for attention in made)


def test_the_anomaly_model_takes_the_papers_step_unless_told_otherwise():
    "How a step of another size is taken is in test_graph_anomaly.py."
    graph = load_graph("digits-knn")
    edges, y = AnomalyEnergyTransformer.prepare(graph), jnp.asarray(scaled(graph))
    config = replace(QUICK.model, step_size=AnomalyConfig().step_size, steps=1)
    model = AnomalyEnergyTransformer(y.shape[1], config, rngs=nnx.Rngs(0))
    ((block, context, x, end),) = model.descents(y, edges)
    step = block.update(block.norm(x), **context)
    assert_close(end, x + step, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parts", [False, True])
def test_scores_are_of_every_test_node_and_of_the_model_at_rest(parts):
    """No dropout in what is reported, whatever training does, and no part of the graph
    or of its test nodes in place of all.
    """
    graph, some = load_graph("digits-knn"), SampleConfig(40, 120, 4)
    config = replace(QUICK, sample=some if parts else SampleConfig())
    run = train_anomaly(config, graph, progress=False)
    edges, y = AnomalyEnergyTransformer.prepare(graph), jnp.asarray(scaled(graph))
    used = nnx.jit(lambda model, y, edges: jax.nn.softmax(model(y, edges))[:, 1])
    assert_close(run.p, np.asarray(used(run.model, y, edges)), rtol=1e-5)
    own = split(graph.labels, QUICK.train_fraction, QUICK.seed)
    for found, ids in ((run.test, own.test), (run.validation, own.validation)):
        assert found == anomaly_scores(graph.labels[ids], run.p[ids], run.threshold)


def test_graphs_are_evaluated_without_noise():
    """What a classifier predicts is what it would without the noise and the dropout of
    training: not even a fixed draw is left.
    """
    graphs = load_graphs("rings")[np.arange(6)]
    encoding = learn_encoding(graphs, np.arange(6))
    data = Supply(graphs, encoding, laplacian_positions(graphs, 2))
    sizes = dict(dim=16, num_heads=2, head_dim=8, num_memories=8, blocks=1)
    noisy = ClassifyConfig(**sizes, num_positions=2, noise=0.5, dropout=0.5)

    def predicted(config):
        model = GraphClassifier(data.num_features, 2, config, rngs=nnx.Rngs(0))
        return predict_logits(model, data, np.arange(6))

    quiet = predicted(replace(noisy, noise=0.0, dropout=0.0))
    assert_close(predicted(noisy), quiet, rtol=1e-6)


PERMALINK = re.compile(r"github\.com/([\w-]+/[\w.-]+)/blob/([0-9a-f]{40})/[\w./-]+")
BY_PUBLIC_CODE = re.compile(r"\b(?:image|anomaly|classification) code\b|\bport\b")


def test_the_table_names_whose_each_mistake_is_and_tests_that_exist():
    cells = json.loads((NBS / "52_errata.ipynb").read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells)
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.M)  # of three tables
    mistakes, lines, caught_by = rows[:20], dict(rows[20:-20]), rows[-20:]
    assert [int(n) for n, _ in mistakes + caught_by] == [*range(1, 21)] * 2
    assert all(map(PERMALINK.search, lines.values()))
    for (number, row), (_, caught) in zip(mistakes, caught_by):
        _, whose, right, _ = row.split(" | ")
        assert (number in lines) == bool(BY_PUBLIC_CODE.search(whose)), whose
        chapters = re.findall(r"\]\(([\w/]+\.ipynb)\)", right)
        assert chapters and all((NBS / chapter).exists() for chapter in chapters)
        named = re.findall(r"`(\w+)::(\w+)`", caught)
        assert named and len(named) == caught.count("::")
        for file, name in named:
            held = (NBS.parent / f"tests/test_{file}.py").read_text("utf-8")
            assert f"def {name}(" in held, name
    # every commit that is linked is one of those that are listed
    sources = re.findall(r"github\.com/([\w-]+/[\w.-]+)/tree/(\w{40})", text)
    assert {*PERMALINK.findall(text)} == {*sources} and len(sources) == 6
