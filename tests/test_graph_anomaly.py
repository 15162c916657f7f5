"""The anomaly model, its loss and scores against their definitions, and a training that never looks at the test labels."""
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.dynamics import descend
from et_nbdev.graph.anomaly import (AnomalyConfig, AnomalyEnergyTransformer, AnomalyTraining, Batch, best_threshold, explain, inputs, scores,
                                    train_anomaly, train_classifier, weighted_loss)
from et_nbdev.graph.data import Graph, from_relations, load_graph, split
from et_nbdev.testing import assert_close
from et_nbdev.training import OptimConfig

pytestmark = pytest.mark.usefixtures("compiled_once")
SMALL = AnomalyConfig(dim=8, num_heads=2, head_dim=4, num_memories=12, hidden=8)


def toy(n=30, seed=0, kinds=2):
    "A random graph with both directions of every edge, an isolated node, and two kinds of edges."
    rng = np.random.default_rng(seed)
    relations = {}
    for kind in range(kinds):
        a, b = rng.integers(0, n - 1, (2, 2 * n))
        relations[f"kind{kind}"] = (np.concatenate([a, b]), np.concatenate([b, a]))     # with repetitions and loops, which `prepare` removes
    labels = (rng.random(n) < 0.3).astype(np.int8)
    return from_relations(relations, rng.normal(size=(n, 5)).astype(np.float32), labels, "toy")


def build(graph, config=SMALL, **options):
    edges = AnomalyEnergyTransformer.prepare(graph, config.relations)
    y = inputs(graph, config.degree)
    return AnomalyEnergyTransformer(y.shape[1], config, num_nodes=graph.num_nodes, kinds=len(edges), rngs=nnx.Rngs(0), **options), jnp.asarray(y), edges


def test_inputs_are_standardised_and_know_the_degree():
    graph = toy()
    y = inputs(graph)
    assert y.shape == (30, 6) and inputs(graph, degree=False).shape == (30, 5)
    assert_close(y.std(0), np.ones(6, np.float32), rtol=1e-5)
    assert np.argmax(y[:, 5]) == np.argmax(graph.degrees)
    flat = replace(graph, features=np.ones_like(graph.features))
    assert np.all(inputs(flat)[:, :5] == 0)


def test_the_model_is_recurrent_and_reads_the_first_and_the_last_state():
    model, y, edges = build(toy(), replace(SMALL, steps=2, step_size=0.5))
    block, x = model.blocks[0], model.encode(y)
    first = block.norm(x)
    for _ in range(2): x = x + 0.5 * block.update(block.norm(x), edges[0])
    read = jnp.concatenate([first, block.norm(x)], -1)
    assert_close(model(y, edges), model.down(nnx.relu(model.up(read))), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("relations", ["max", "concat"])
def test_every_relation_has_a_block_of_its_own(relations):
    graph = toy()
    model, y, edges = build(graph, replace(SMALL, relations=relations))
    assert len(model.blocks) == len(edges) == 2
    reads = []
    for block, kind in zip(model.blocks, edges):
        x = model.encode(y)
        reads.append(jnp.concatenate([block.norm(x), block.norm(descend(block, x, 2, 1.0, mask=kind)[0])], -1))
    read = jnp.maximum(*reads) if relations == "max" else jnp.concatenate(reads, -1)
    assert_close(model(y, edges), model.down(nnx.relu(model.up(read))), rtol=1e-4, atol=1e-5)


def test_relabelling_the_nodes_relabels_the_verdicts():
    graph = toy(kinds=1)
    model, y, edges = build(graph)
    order = np.random.default_rng(1).permutation(graph.num_nodes)
    place = np.argsort(order)
    shuffled = Graph(place[graph.senders], place[graph.receivers], graph.features[order], graph.labels[order])
    assert_close(model(jnp.asarray(inputs(shuffled)), model.prepare(shuffled)), model(y, edges)[order], rtol=1e-3, atol=1e-4)


def test_dropout_is_for_training_alone():
    model, y, edges = build(toy(), replace(SMALL, dropout=0.5))
    assert np.array_equal(model(y, edges), model(y, edges))
    one, two = (model(y, edges, rngs=nnx.Rngs(dropout=seed)) for seed in (0, 1))
    assert not np.array_equal(one, two) and not np.array_equal(one, model(y, edges))


def test_positions_start_at_nothing_and_can_be_learned():
    model, y, edges = build(toy(), replace(SMALL, positions=True))
    plain, _, _ = build(toy())
    assert np.array_equal(model(y, edges), plain(y, edges))
    grad = nnx.grad(lambda m: m(y, edges).sum())(model)
    assert np.abs(grad.positions[...]).max() > 0
    with pytest.raises(ValueError, match="num_nodes"):
        AnomalyEnergyTransformer(6, replace(SMALL, positions=True), rngs=nnx.Rngs(0))


def test_the_loss_weighs_both_classes_alike():
    graph = toy()
    model, y, edges = build(graph)
    nodes = np.arange(3, 25)
    l = graph.labels[nodes].astype(np.int32)
    batch = Batch(y, edges, jnp.asarray(nodes), jnp.asarray(l))
    p = np.asarray(jax.nn.softmax(model(y, edges)), np.float64)[nodes]
    sigma = (l == 0).sum() / (l == 1).sum()
    want = -sum((sigma if c else 1) * np.log(row[c]) for row, c in zip(p, l)) / sum(sigma if c else 1 for c in l)
    assert_close(weighted_loss(model, batch, jax.random.key(0))[0], np.float32(want), rtol=1e-5)


def test_scores_on_a_case_done_by_hand():
    l, p = np.array([0, 1, 0, 1]), np.array([0.1, 0.4, 0.6, 0.9])
    got = scores(l, p, 0.5)             # one of each cell of the confusion matrix: F1 is 1/2 for both classes
    assert got["macro_f1"] == 0.5 and got["auroc"] == 0.75 and got["recall_at_k"] == 0.5
    assert got["auprc"] == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert scores(l, p, best_threshold(l, p))["macro_f1"] >= 0.5
    with pytest.raises(ValueError, match="finite"): scores(l, np.full(4, np.nan), 0.5)
    with pytest.raises(ValueError, match="anomalous"): scores(np.zeros(4, int), p, 0.5)


QUICK = AnomalyTraining(model=SMALL, optim=OptimConfig(steps=6, warmup=0, lr=1e-2, lr_floor=1e-2), every=3)


def test_training_repeats_and_never_looks_at_the_test_labels():
    graph = load_graph("digits-knn")
    one, again = (train_anomaly(QUICK, graph, progress=False) for _ in range(2))
    assert np.array_equal(one.p, again.p) and one.test == again.test
    parts = split(graph.labels, QUICK.train_fraction, QUICK.seed)
    flipped = graph.labels.copy()
    flipped[parts.test] = 1 - flipped[parts.test]
    model, y, edges = build(graph)
    a, b = (train_classifier(model, replace(graph, labels=labels), parts, np.asarray(y), edges, QUICK.optim, every=3, progress=False)
            for labels in (graph.labels, flipped))
    assert np.array_equal(a.p, b.p) and a.threshold == b.threshold and a.validation == b.validation and a.test != b.test


def test_a_stopped_run_goes_on(tmp_path):
    graph = load_graph("digits-knn")
    whole = train_anomaly(QUICK, graph, progress=False)
    train_anomaly(QUICK, graph, tmp_path, progress=False)
    resumed = train_anomaly(QUICK, graph, tmp_path, progress=False)        # finds a finished run
    assert np.array_equal(whole.p, resumed.p)


def test_explanations_add_up():
    graph = toy(kinds=1)
    model, y, edges = build(graph)
    why = explain(model, y, edges)
    block = model.blocks[0]
    g = block.norm(descend(block, model.encode(y), SMALL.steps, SMALL.step_size, mask=edges[0])[0])
    energies = block.energies(g, edges[0])
    assert_close(why.attention_energy.sum(), np.asarray(energies.attention), rtol=1e-4)
    assert_close(why.memory_energy.sum(), np.asarray(energies.memory), rtol=1e-4)
    receivers = edges[0].edge_list()[1]
    assert_close(np.add.reduceat(why.edge_weights[:, 0], np.unique(receivers, return_index=True)[1]), np.ones(len(np.unique(receivers)), np.float32), rtol=1e-4)


def test_bad_input_is_named():
    graph = load_graph("digits-knn")
    for field, value in dict(dim=0, steps=0, step_size=0.0, dropout=1.0, relations="sum", num_heads=-1).items():
        with pytest.raises(ValueError, match=field): replace(SMALL, **{field: value})
    with pytest.raises(ValueError, match="train_fraction"): AnomalyTraining(train_fraction=1.0)
    bare = replace(graph, senders=np.zeros(0, np.int32), receivers=np.zeros(0, np.int32))
    with pytest.raises(ValueError, match="no edges"): train_anomaly(QUICK, bare, progress=False)
    with pytest.raises(ValueError, match="one kind"): train_anomaly(replace(QUICK, model=replace(SMALL, relations="max")), graph, progress=False)
    with pytest.raises(ValueError, match="both classes"): train_anomaly(QUICK, replace(graph, labels=np.zeros_like(graph.labels)), progress=False)
