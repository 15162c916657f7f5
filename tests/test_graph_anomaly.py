"""The anomaly model, its loss and scores against their definitions, a training that
never looks at the test labels, and its console script.
"""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import et_nbdev
from et_nbdev.dynamics import descend
from et_nbdev.graph import _anomaly_command as command
from et_nbdev.graph import _anomaly_demo, anomaly, kernels
from et_nbdev.graph import _anomaly_engine as engine
from et_nbdev.graph._anomaly_command import _CONFIGS, _main, _report
from et_nbdev.graph._anomaly_engine import (
    _Batch,
    _best_threshold,
    _sample_nodes,
    _sampled,
    _scores,
    _train_classifier,
)
from et_nbdev.graph.anomaly import (
    AnomalyConfig,
    AnomalyEnergyTransformer,
    AnomalyTraining,
    SampleConfig,
    _inputs,
    _load_detector,
    _weighted_loss,
    explain,
    train_anomaly,
)
from et_nbdev.graph.data import (
    _DATASETS,
    Graph,
    from_relations,
    load_graph,
    save_graph,
    split,
)
from et_nbdev.testing import assert_close
from et_nbdev.training.checkpoint import CheckpointError, _read_meta, _save_checkpoint
from et_nbdev.training.loop import OptimConfig

pytestmark = pytest.mark.usefixtures("compiled_once", "compile_quickly")
SMALL = AnomalyConfig(dim=8, num_heads=2, head_dim=4, num_memories=12, hidden=8)


def toy(n=30, seed=0, kinds=2):
    """A random graph with both directions of every edge, an isolated node, and two
    kinds of edges.
    """
    rng = np.random.default_rng(seed)
    relations = {}
    for kind in range(kinds):
        a, b = rng.integers(0, n - 1, (2, 2 * n))
        # with repetitions and loops, which `prepare` removes
        relations[f"kind{kind}"] = (np.concatenate([a, b]), np.concatenate([b, a]))
    labels = (rng.random(n) < 0.3).astype(np.int8)
    return from_relations(
        relations, rng.normal(size=(n, 5)).astype(np.float32), labels, "toy"
    )


def build(graph, config=SMALL, **options):
    edges = AnomalyEnergyTransformer.prepare(graph, config.relations)
    y = _inputs(graph, config.degree)
    return (
        AnomalyEnergyTransformer(
            y.shape[1],
            config,
            num_nodes=graph.num_nodes,
            kinds=len(edges),
            rngs=nnx.Rngs(0),
            **options,
        ),
        jnp.asarray(y),
        edges,
    )


def test_inputs_are_standardized_and_know_the_degree():
    graph = toy()
    y = _inputs(graph)
    assert y.shape == (30, 6) and _inputs(graph, degree=False).shape == (30, 5)
    assert_close(y.std(0), np.ones(6, np.float32), rtol=1e-5)
    assert np.argmax(y[:, 5]) == np.argmax(graph.degrees)
    flat = replace(graph, features=np.ones_like(graph.features))
    assert np.all(_inputs(flat)[:, :5] == 0)


def test_the_model_is_recurrent_and_reads_the_first_and_the_last_state():
    model, y, edges = build(toy(), replace(SMALL, steps=2, step_size=0.5))
    block, x = model.blocks[0], model.encode(y)
    first = block.norm(x)
    for _ in range(2):
        x = x + 0.5 * block.update(block.norm(x), edges=edges[0])
    read = jnp.concatenate([first, block.norm(x)], -1)
    assert_close(
        model(y, edges), model.down(nnx.relu(model.up(read))), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("relations", ["max", "concat"])
def test_every_relation_has_a_block_of_its_own(relations):
    graph = toy()
    model, y, edges = build(graph, replace(SMALL, relations=relations))
    assert len(model.blocks) == len(edges) == 2
    reads = []
    for block, kind in zip(model.blocks, edges):
        x = model.encode(y)
        reads.append(
            jnp.concatenate(
                [block.norm(x), block.norm(descend(block, x, 2, 1.0, edges=kind)[0])],
                -1,
            )
        )
    read = jnp.maximum(*reads) if relations == "max" else jnp.concatenate(reads, -1)
    assert_close(
        model(y, edges), model.down(nnx.relu(model.up(read))), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("heads, memories", [(0, 12), (2, 0)])
def test_a_model_without_heads_or_without_memories_runs_and_trains(heads, memories):
    graph = toy(kinds=1)
    config = replace(SMALL, num_heads=heads, num_memories=memories)
    model, y, edges = build(graph, config)
    assert model.blocks[0].names == (("attention",) if heads else ("memory",))
    grads = nnx.grad(lambda m: jnp.sum(m(y, edges) ** 2))(model)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads.blocks))
    why, E = explain(model, y, edges), len(edges[0].edge_list()[0])
    assert why.edge_weights.shape == (E, heads) and why.memories.shape == (30, memories)
    for name, count in (("attention", heads), ("memory", memories)):
        share = getattr(why, f"{name}_energy")
        assert share.shape == (30,) and (share != 0).any() == (count > 0)


def test_relabeling_the_nodes_relabels_the_verdicts():
    graph = toy(kinds=1)
    model, y, edges = build(graph)
    order = np.random.default_rng(1).permutation(graph.num_nodes)
    place = np.argsort(order)
    shuffled = Graph(
        place[graph.senders],
        place[graph.receivers],
        graph.features[order],
        graph.labels[order],
    )
    assert_close(
        model(jnp.asarray(_inputs(shuffled)), model.prepare(shuffled)),
        model(y, edges)[order],
        rtol=1e-3,
        atol=1e-4,
    )


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
    batch = _Batch(y, edges, jnp.asarray(nodes), jnp.asarray(l))
    p = np.asarray(jax.nn.softmax(model(y, edges)), np.float64)[nodes]
    sigma = (l == 0).sum() / (l == 1).sum()
    want = -sum((sigma if c else 1) * np.log(row[c]) for row, c in zip(p, l)) / sum(
        sigma if c else 1 for c in l
    )
    assert_close(
        _weighted_loss(model, batch, jax.random.key(0))[0], np.float32(want), rtol=1e-5
    )


def test_scores_on_a_case_done_by_hand():
    l, p = np.array([0, 1, 0, 1]), np.array([0.1, 0.4, 0.6, 0.9])
    # one of each cell of the confusion matrix: F1 is 1/2 for both classes
    got = _scores(l, p, 0.5)
    assert got["macro_f1"] == 0.5 and got["auroc"] == 0.75 and got["recall_at_k"] == 0.5
    assert got["auprc"] == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert _scores(l, p, _best_threshold(l, p))["macro_f1"] >= 0.5
    with pytest.raises(ValueError, match="finite"):
        _scores(l, np.full(4, np.nan), 0.5)
    with pytest.raises(ValueError, match="anomalous"):
        _scores(np.zeros(4, int), p, 0.5)


QUICK = AnomalyTraining(
    model=SMALL, optim=OptimConfig(steps=6, warmup=0, lr=1e-2, lr_floor=1e-2), every=3
)


def test_training_repeats_and_never_looks_at_the_test_labels():
    graph = load_graph("digits-knn")
    one, again = (train_anomaly(QUICK, graph, progress=False) for _ in range(2))
    assert np.array_equal(one.p, again.p) and one.test == again.test
    parts = split(graph.labels, QUICK.train_fraction, QUICK.seed)
    flipped = graph.labels.copy()
    flipped[parts.test] = 1 - flipped[parts.test]
    model, y, edges = build(graph)
    a, b = (
        _train_classifier(
            model,
            replace(graph, labels=labels),
            parts,
            np.asarray(y),
            edges,
            QUICK.optim,
            every=3,
            progress=False,
            loss=_weighted_loss,
        )
        for labels in (graph.labels, flipped)
    )
    assert (
        np.array_equal(a.p, b.p)
        and a.threshold == b.threshold
        and a.validation == b.validation
        and a.test != b.test
    )


def test_a_stopped_run_goes_on(tmp_path):
    graph = load_graph("digits-knn")
    whole = train_anomaly(QUICK, graph, progress=False)
    train_anomaly(QUICK, graph, tmp_path, progress=False)
    # finds a finished run
    resumed = train_anomaly(QUICK, graph, tmp_path, progress=False)
    assert np.array_equal(whole.p, resumed.p)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    "A folder with a run on the bundled graph."
    train_anomaly(
        QUICK,
        load_graph("digits-knn"),
        folder := tmp_path_factory.mktemp("trained"),
        progress=False,
    )
    return folder


@pytest.mark.parametrize(
    "field, i", [("labels", 8), ("features", 8), ("receivers", 100)]
)
def test_a_run_on_other_data_does_not_go_on(trained, field, i):
    """Least of all where corrected labels have made test nodes of some that it was
    trained on.
    """
    graph = load_graph("digits-knn")
    other = np.array(getattr(graph, field))
    other[[0, i]] = other[[i, 0]]
    assert not np.array_equal(other, getattr(graph, field))
    with pytest.raises(
        CheckpointError, match=f"{trained}: .*graph.digest: '{graph.digest}' there"
    ):
        train_anomaly(QUICK, replace(graph, **{field: other}), trained, progress=False)


def test_a_run_goes_on_under_another_name_and_its_weights_can_be_loaded(trained):
    graph = load_graph("digits-knn")
    again = train_anomaly(QUICK, replace(graph, name="moved"), trained, progress=False)
    model = _load_detector(trained / "best.safetensors")
    assert_close(
        jax.nn.softmax(model(jnp.asarray(_inputs(graph)), model.prepare(graph)))[:, 1],
        again.p,
        rtol=1e-4,
        atol=1e-5,
    )


def test_the_digest_knows_which_relation_an_edge_is_of():
    one, two = toy(), toy()
    swapped = replace(
        one, relations=dict(zip(one.relations, reversed(one.relations.values())))
    )
    assert (
        one.digest == two.digest
        and len(
            {
                one.digest,
                swapped.digest,
                one.simple().digest,
                replace(one, relations={}).digest,
            }
        )
        == 4
    )


def test_predictions_that_are_no_longer_finite_are_named():
    for lr in (1e20, 1e30):
        with pytest.raises(
            FloatingPointError,
            match=(
                rf"predictions are no longer finite.*lr = {re.escape(str(lr))}.*step"
                r" size"
            ),
        ):
            train_anomaly(
                replace(QUICK, every=1, optim=replace(QUICK.optim, lr=lr, lr_floor=lr)),
                load_graph("digits-knn"),
                progress=False,
            )


# --- parts of a graph
# --------------------------------------------------------------------------------------


def chain(n=120, kinds=1, one_way=False):
    """Nodes in a circle, each seen from one and three places on, and from as far back
    unless `one_way`: nothing is near to everything.
    """
    rng, i = np.random.default_rng(2), np.arange(n)
    ends = [
        (np.concatenate([i, i]), np.concatenate([(i + 1) % n, (i + 3 + kind) % n]))
        for kind in range(kinds)
    ]
    if not one_way:
        ends = [(np.concatenate([s, r]), np.concatenate([r, s])) for s, r in ends]
    return from_relations(
        {f"kind{k}": e for k, e in enumerate(ends)},
        rng.normal(size=(n, 5)),
        (rng.random(n) < 0.3).astype(np.int8),
        "chain",
    )


def within(graph, nodes, hops):
    for _ in range(hops):
        near = [b[np.isin(a, nodes)] for a, b in (graph.edges, graph.edges[::-1])]
        nodes = np.unique(np.concatenate([nodes, *near]))
    return nodes


@nnx.jit
def loss_and_logits(model, batch):
    return (
        _weighted_loss(model, batch, jax.random.key(0))[0],
        model(batch.features, batch.edges)[batch.nodes],
    )


@pytest.mark.parametrize(
    "backend, one_way, relations",
    [
        ("compiled", True, "merged"),
        ("compiled", False, "concat"),
        ("xla", False, "merged"),
    ],
)
def test_a_part_with_all_nodes_of_2T_hops_has_the_loss_of_the_whole(
    backend, one_way, relations, monkeypatch
):
    if backend == "xla":
        monkeypatch.setattr(kernels, "available", lambda: False)
    graph = chain(kinds=2 if relations == "concat" else 1, one_way=one_way)
    model, y, edges = build(graph, replace(SMALL, relations=relations, degree=False))
    assert edges[0].backend == backend
    seeds, labels = np.array([7, 60, 61]), jnp.asarray([0, 1, 0])
    want = loss_and_logits(model, _Batch(y, edges, jnp.asarray(seeds), labels))
    # two a step: whom I see, and whom those who see me see
    for hops, exact in ((SMALL.steps, False), (2 * SMALL.steps, True)):
        ball = within(graph, seeds, hops)
        nodes, part = _sample_nodes(
            edges, seeds, SampleConfig(3, len(ball), 50), np.random.default_rng(0)
        )
        assert (
            len(ball) < graph.num_nodes
            and np.array_equal(np.sort(nodes), ball)
            and np.array_equal(nodes[:3], seeds)
        )
        got = loss_and_logits(model, _Batch(y[nodes], part, jnp.arange(3), labels))
        off = max(
            float(jnp.abs(a - b).max() / jnp.abs(b).max())
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want))
        )
        assert (off < 1e-4) == exact, (hops, off)


def test_a_part_is_drawn_at_random_from_the_graph_and_keeps_its_size():
    graph = load_graph("digits-knn")
    edges = AnomalyEnergyTransformer.prepare(graph)
    has = set(zip(*(ends.tolist() for ends in graph.edges)))
    seeds, seen, shapes = np.array([5, 900, 1700]), [], set()
    for draw in range(3):
        nodes, (part,) = _sample_nodes(
            edges, seeds, SampleConfig(3, 100, 4), np.random.default_rng(draw)
        )
        senders, receivers = part.edge_list()
        assert len(np.unique(nodes)) == len(nodes) == 100 and np.array_equal(
            nodes[:3], seeds
        )
        assert set(zip(nodes[senders].tolist(), nodes[receivers].tolist())) <= has
        within_part = np.isin(graph.senders, nodes) & np.isin(graph.receivers, nodes)
        degrees = np.bincount(graph.receivers[within_part], minlength=graph.num_nodes)[
            nodes
        ]
        assert np.array_equal(
            np.bincount(receivers, minlength=100), np.minimum(degrees, 4)
        )
        seen.append(set(nodes.tolist()))
        shapes.add(tuple(leaf.shape for leaf in jax.tree.leaves(part)))
    assert len(shapes) == 1 and seen[0] != seen[1] != seen[2]
    nodes, _ = _sample_nodes(
        edges, seeds, SampleConfig(3, 5000, 4), np.random.default_rng(0)
    )
    # no larger than the graph
    assert np.array_equal(np.sort(nodes), np.arange(graph.num_nodes))


def test_where_nobody_else_can_be_reached_others_fill_up():
    alone = replace(
        chain(40), senders=np.array([0, 1]), receivers=np.array([1, 0]), relations={}
    )
    nodes, (part,) = _sample_nodes(
        AnomalyEnergyTransformer.prepare(alone),
        np.array([0, 9]),
        SampleConfig(2, 12, 3),
        np.random.default_rng(0),
    )
    assert len(np.unique(nodes)) == 12 and 1 in nodes and part.num_edges == 2


def test_batches_keep_both_classes_and_depend_on_their_number_alone():
    graph = load_graph("digits-knn")
    train = split(graph.labels, 0.4, 0).train
    y = _inputs(graph)
    edges = AnomalyEnergyTransformer.prepare(graph)
    batches = _sampled(y, edges, graph.labels, train, SampleConfig(50, 200, 4), seed=1)
    first = [batch for batch, _ in zip(batches(0), range(4))]
    for batch, again in zip(first[2:], batches(2)):
        assert all(
            np.array_equal(a, b)
            for a, b in zip(jax.tree.leaves(batch), jax.tree.leaves(again))
        )
    for batch in first:
        assert (
            batch.labels.sum() == round(50 * graph.labels[train].mean()) == 5
            and len(batch.labels) == 50
            and batch.features.shape == (200, y.shape[1])
        )
    assert not np.array_equal(first[0].features, first[1].features)
    with pytest.raises(
        ValueError, match="seeds: expected at most the 719 training nodes, got 800"
    ):
        _sampled(y, edges, graph.labels, train, SampleConfig(800, 900), seed=1)


def test_training_on_parts_compiles_once_and_goes_on_where_it_was(
    tmp_path, monkeypatch
):
    graph = load_graph("digits-knn")
    config = replace(QUICK, sample=SampleConfig(40, 120, 4))
    traced, drawn, plain_loss, plain_sample = [], [], _weighted_loss, _sample_nodes

    def loss(*args):
        traced.append(1)
        return plain_loss(*args)

    def stop_at_the_fifth(*args):
        drawn.append(1)
        if len(drawn) == 5:
            raise InterruptedError
        return plain_sample(*args)

    monkeypatch.setattr(anomaly, "_weighted_loss", loss)
    whole = train_anomaly(config, graph, progress=False)
    assert len(traced) == 1
    monkeypatch.setattr(engine, "_sample_nodes", stop_at_the_fifth)
    with pytest.raises(InterruptedError):
        train_anomaly(config, graph, tmp_path, progress=False)
    monkeypatch.setattr(engine, "_sample_nodes", plain_sample)
    resumed = train_anomaly(config, graph, tmp_path, progress=False)
    assert (
        [row["step"] for row in resumed.history] == [3, 6]
        and np.array_equal(whole.p, resumed.p)
        and whole.test == resumed.test
    )
    # through XLA, a table of pairs takes the place of the edges
    monkeypatch.setattr(kernels, "available", lambda: False)
    traced.clear()
    through_xla = train_anomaly(
        replace(config, optim=replace(QUICK.optim, steps=3)), toy(200), progress=False
    )
    assert len(traced) == 1 and np.isfinite(through_xla.p).all()


def test_explanations_add_up():
    graph = toy(kinds=1)
    model, y, edges = build(graph)
    why = explain(model, y, edges)
    block = model.blocks[0]
    g = block.norm(
        descend(block, model.encode(y), SMALL.steps, SMALL.step_size, edges=edges[0])[0]
    )
    energies = jax.tree.map(np.asarray, block.energies(g, edges=edges[0]))
    assert_close(why.attention_energy.sum(), energies["attention"], rtol=1e-4)
    assert_close(why.memory_energy.sum(), energies["memory"], rtol=1e-4)
    receivers = edges[0].edge_list()[1]
    assert_close(
        np.add.reduceat(
            why.edge_weights[:, 0], np.unique(receivers, return_index=True)[1]
        ),
        np.ones(len(np.unique(receivers)), np.float32),
        rtol=1e-4,
    )


def test_features_and_edges_that_do_not_fit_are_named():
    model, y, edges = build(toy())
    for call in (model, partial(explain, model)):
        with pytest.raises(
            ValueError,
            match=r"^features: .*N = 30 as in edges and F = 6, got \(30, 5\)",
        ):
            call(y[:, :5], edges)
        with pytest.raises(ValueError, match=r"^features: .*got \(29, 6\)"):
            call(y[:29], edges)
        with pytest.raises(
            TypeError, match="^features: .*floating-point numbers, got int32"
        ):
            call(y.astype(jnp.int32), edges)
        for wrong in (edges[0], [*edges], (None,)):
            with pytest.raises(
                TypeError,
                match=r"^edges: .*prepare\(graph\) returns, a tuple of EdgeIndex",
            ):
                call(y, wrong)
        with pytest.raises(ValueError, match="^edges: expected 1"):
            call(y, edges * 2)


def test_bad_input_is_named():
    graph = load_graph("digits-knn")
    for field, value in dict(
        dim=0, steps=0, step_size=0.0, dropout=1.0, relations="sum", num_heads=-1
    ).items():
        with pytest.raises(ValueError, match=field):
            replace(SMALL, **{field: value})
    with pytest.raises(ValueError, match="train_fraction"):
        AnomalyTraining(train_fraction=1.0)
    for field, value in dict(seeds=1, nodes=0, neighbors=0).items():
        with pytest.raises(ValueError, match=field):
            SampleConfig(**{field: value})
    with pytest.raises(ValueError, match="seeds: .*nodes = 50"):
        SampleConfig(60, 50)
    with pytest.raises(ValueError, match="positions"):
        AnomalyTraining(model=replace(SMALL, positions=True), sample=SampleConfig(40))
    bare = replace(
        graph, senders=np.zeros(0, np.int32), receivers=np.zeros(0, np.int32)
    )
    with pytest.raises(ValueError, match="no edges"):
        train_anomaly(QUICK, bare, progress=False)
    with pytest.raises(ValueError, match="one kind"):
        train_anomaly(
            replace(QUICK, model=replace(SMALL, relations="max")), graph, progress=False
        )
    with pytest.raises(ValueError, match="both classes"):
        train_anomaly(
            QUICK, replace(graph, labels=np.zeros_like(graph.labels)), progress=False
        )


# --- the console script
# --------------------------------------------------------------------------------------

TINY = [
    "--model.dim",
    "8",
    "--model.num_heads",
    "2",
    "--model.head_dim",
    "4",
    "--model.num_memories",
    "12",
    "--model.hidden",
    "8",
    "--optim.steps",
    "6",
    "--optim.warmup",
    "1",
    "--every",
    "3",
]


def stopped(argv):
    """(status, message) of a command that ends itself; anything but SystemExit would be
    a traceback.
    """
    with pytest.raises(SystemExit) as e:
        _main(argv)
    return (1, e.value.code) if isinstance(e.value.code, str) else (e.value.code, "")


def reported(argv, out):
    "What the command writes about its run."
    _main([*argv, "--out", str(out)])
    return json.loads(
        (out / "metrics.json").read_text(),
        parse_constant=lambda s: pytest.fail(f"{s} is no JSON"),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "(folder, metrics) of a tiny run on two splits."
    out = tmp_path_factory.mktemp("cli") / "deep" / "run"
    return out, reported([*TINY, "--splits", "2", "--seed", "3"], out)


def test_a_run_leaves_weights_logs_and_metrics(run, capsys):
    out, metrics = run
    assert sorted(os.listdir(out)) == ["metrics.json", "seed-3", "seed-4"]
    for seed in (3, 4):
        assert sorted(os.listdir(out / f"seed-{seed}")) == [
            "best.safetensors",
            "detector.safetensors",
            "last.safetensors",
            "metrics.jsonl",
        ]
    assert metrics["config"]["model"]["dim"] == 8
    assert metrics["config"]["seed"] == 3 and metrics["splits"] == 2
    assert (
        {"commit", "device", "cores", "jax", "date", "training_seconds"} <= set(metrics)
        and metrics["data"] == "digits-knn"
        and metrics["nodes"] == 1797
    )
    graph = load_graph("digits-knn")
    for row, seed in zip(metrics["runs"], (3, 4)):
        parts = split(graph.labels, 0.4, seed)
        assert (
            row["seed"] == seed
            and row["nodes"]
            == {name: len(nodes) for name, nodes in parts._asdict().items()}
            and row["best_step"] in (3, 6)
        )
        assert (
            sum(row["anomalous"].values()) == graph.labels.sum()
            and row["training_seconds"] > 0
        )


def test_the_report_is_of_the_best_weights_on_every_split(run):
    out, metrics = run
    graph = load_graph("digits-knn")
    for row in metrics["runs"]:
        model = _load_detector(out / f"seed-{row['seed']}" / "best.safetensors")
        p = np.asarray(
            jax.nn.softmax(model(jnp.asarray(_inputs(graph)), model.prepare(graph)))[
                :, 1
            ]
        )
        test = split(graph.labels, 0.4, row["seed"]).test
        for score, value in _scores(
            graph.labels[test], p[test], row["threshold"]
        ).items():
            assert value == pytest.approx(row["test"][score], abs=0.01)
    for score in ("macro_f1", "auroc", "auprc", "recall_at_k"):
        a, b = (row["test"][score] for row in metrics["runs"])
        assert metrics["test"][score] == pytest.approx((a + b) / 2) and metrics[
            "deviation"
        ][score] == pytest.approx(abs(a - b) / 2**0.5)
    assert metrics["parameters"] == sum(
        p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param))
    )


def test_run_again_it_finishes_at_once(run, monkeypatch, capsys):
    out, metrics = run
    before = {path: path.read_bytes() for path in out.glob("*/*")}
    monkeypatch.setattr(
        anomaly, "_weighted_loss", lambda *args: pytest.fail("trained again")
    )
    again = reported([*TINY, "--splits", "2", "--seed", "3"], out)
    assert again["runs"] == metrics["runs"] and before == {
        path: path.read_bytes() for path in out.glob("*/*")
    }
    printed = capsys.readouterr().out
    assert "over 2 splits" in printed and "Split 2 of 2 (seed 4)" in printed
    for score, mean in metrics["test"].items():
        assert f"{score:<12}{mean:.4f} ± {metrics['deviation'][score]:.4f}" in printed
    with pytest.raises(
        SystemExit, match=re.escape(str(out)) + ".*model.beta: None there, 2.0 here"
    ):
        _main([*TINY, "--seed", "3", "--out", str(out), "--model.beta", "2"])


KILLED = """
import os, signal, sys
from et_nbdev.graph._anomaly_command import _main
target, seen, replace = sys.argv[1], [], os.replace
def die_in_the_middle(source, path):
    seen.extend([path] if str(path).endswith(target) else [])
    if len(seen) == 2:
        os.truncate(source, os.path.getsize(source) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, path)
if target: os.replace = die_in_the_middle
for name in ("killed", "whole"): _main([*sys.argv[3:], "--out", f"{sys.argv[2]}/{name}"])
"""


def test_a_killed_run_ends_with_the_numbers_of_an_undisturbed_one(tmp_path):
    "SIGKILL while a checkpoint is being written."
    # no cache: see tests/test_training.py
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(et_nbdev.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    start = lambda target: subprocess.run(
        [sys.executable, "-c", KILLED, target, tmp_path, *TINY],
        env=env,
        capture_output=True,
        text=True,
    )
    assert start("seed-0/last.safetensors").returncode == -signal.SIGKILL
    assert (tmp_path / "killed/seed-0/last.safetensors").exists() and not (
        tmp_path / "killed/metrics.json"
    ).exists()
    ended = start("")
    assert ended.returncode == 0, ended.stderr
    killed, whole = (
        json.loads((tmp_path / name / "metrics.json").read_text())["runs"][0]
        for name in ("killed", "whole")
    )
    assert killed | {"training_seconds": 0} == whole | {"training_seconds": 0}
    for name in ("best", "last"):
        assert same_weights(
            *(
                tmp_path / which / "seed-0" / f"{name}.safetensors"
                for which in ("killed", "whole")
            )
        )
    assert not list(tmp_path.glob("killed/*/.*"))


def same_weights(a, b):
    import safetensors.numpy

    a, b = safetensors.numpy.load_file(a), safetensors.numpy.load_file(b)
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--data", "cora"], ["cora", *_DATASETS, ".npz"]),
        (["--data", "tolokers"], ["tolokers.npz", "ET_DATA", "https://"]),
        (["--config", "amazon"], ["Amazon.mat", "dgl", "pip install"]),
        (["--config", "huge"], ["--config", "huge", "amazon", "tfinance"]),
        (["--model.dim", "zero"], ["--model.dim", "zero", "int"]),
        (["--model.dim", "0"], ["dim", "at least 1"]),
        (["--model.relations", "sum"], ["--model.relations", "sum", "concat"]),
        (["--model.relations", "max"], ["relations", "one kind"]),
        (["--train_fraction", "1.5"], ["train_fraction", "1.5"]),
        (["--train_fraction", "0.002"], ["train_fraction", "one class only"]),
        (["--every", "0"], ["every"]),
        (["--seed", "-1"], ["seed", "-1"]),
        (["--splits", "0"], ["--splits", "0"]),
        (["--seed", "4294967295", "--splits", "2"], ["seed, splits", "4294967296"]),
        (["--optim.lr", "-1"], ["lr"]),
        (["--model.step_size", "nan"], ["step_size"]),
        (["--wings", "2"], ["--wings"]),
        (["--out", "file/below"], ["file"]),
    ],
)
def test_a_bad_option_is_named(tmp_path, monkeypatch, capsys, argv, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ET_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "dgl", None)
    Path("file").write_text("in the way")
    monkeypatch.setattr(engine, "fit", fit_no_further_than_the_folder)
    status, message = stopped([*(TINY if argv[0] != "--config" else []), *argv])
    message += capsys.readouterr().err
    assert status and all(word in message for word in says), message
    assert not list(tmp_path.glob("**/*.safetensors"))


def fit_no_further_than_the_folder(*args, folder, **kwargs):
    folder.mkdir(parents=True)
    pytest.fail("got as far as training")


def test_a_diverged_run_ends_with_one_line(tmp_path):
    status, message = stopped(
        [*TINY, "--every", "1", "--optim.lr", "1e20", "--out", str(tmp_path)]
    )
    assert (
        status == 1
        and message.startswith("et_train_anomaly: ")
        and "lr = 1e+20" in message
        and "step size" in message
        and "\n" not in message
    )


def test_a_graph_with_one_class_is_refused(tmp_path, capsys):
    graph = load_graph("digits-knn")
    save_graph(
        replace(graph, labels=np.zeros_like(graph.labels)), tmp_path / "calm.npz"
    )
    status, message = stopped(
        [*TINY, "--data", str(tmp_path / "calm.npz"), "--out", str(tmp_path / "run")]
    )
    assert (
        status
        and "both classes" in message
        and "1797 normal and 0 anomalous" in message
        and not (tmp_path / "run").exists()
    )
    assert "Split" not in capsys.readouterr().out


def test_a_file_of_ones_own_is_a_graph_like_any_other(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graph = load_graph("digits-knn")
    once = graph.senders < graph.receivers
    # every edge in one direction
    save_graph(
        replace(graph, senders=graph.senders[once], receivers=graph.receivers[once]),
        "mine.npz",
    )
    _main([*TINY, "--seed", "3", "--data", "mine.npz"])
    metrics = json.loads(Path("runs/mine/metrics.json").read_text())
    assert metrics["edges"] == graph.num_edges
    assert (
        metrics["test"]["auroc"]
        == pytest.approx(run[1]["runs"][0]["test"]["auroc"], abs=1e-4)
        and metrics["deviation"]["auroc"] == 0
    )


def test_options_reach_the_configuration(monkeypatch):
    seen = []
    monkeypatch.setattr(command, "load_graph", lambda name: name)
    monkeypatch.setattr(command, "_report", lambda *args: seen.append(args))
    for name, config in _CONFIGS.items():
        _main(["--config", name])
        assert seen.pop() == (config, config.data, Path("runs") / config.data, 1)
    _main(
        [
            "--config",
            "amazon",
            "--data",
            "amazon-upu",
            "--model.positions",
            "true",
            "--model.beta",
            "none",
            "--optim.lr",
            "0.01",
            "--splits",
            "5",
            "--out",
            "x",
        ]
    )
    base = _CONFIGS["amazon"]
    want = replace(
        base,
        data="amazon-upu",
        model=replace(base.model, positions=True),
        optim=replace(base.optim, lr=0.01, lr_floor=base.optim.lr_floor),
    )
    assert seen.pop() == (want, "amazon-upu", Path("x"), 5)


def test_help_explains_every_option_with_its_default(capsys):
    for name, config in _CONFIGS.items():
        assert stopped(["--config", name, "--help"]) == (0, "")
        text = re.sub(r"\s+", "", capsys.readouterr().out)

        def check(config, prefix=""):
            for f in fields(config):
                value = getattr(config, f.name)
                if is_dataclass(value):
                    check(value, f"{f.name}.")
                else:
                    assert (
                        re.sub(r"\s+", "", f"{f.metadata['help']} (default: {value})")
                        in text
                        and f"--{prefix}{f.name}" in text
                    ), f.name

        check(config)
        for option in ("--config", "--out", "--splits"):
            assert option in text


def test_what_is_no_anomaly_model_is_refused(tmp_path):
    _save_checkpoint(
        tmp_path / "x.safetensors",
        {"params": {"w": np.ones(3)}},
        {"config": {"model": {"depth": 12}, "graph": {}}},
    )
    with pytest.raises(
        CheckpointError, match="x.safetensors: holds no anomaly model.*depth"
    ):
        _load_detector(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        _load_detector(tmp_path / "none")
    with pytest.raises(ValueError, match="splits"):
        _report(QUICK, load_graph("digits-knn"), tmp_path, splits=0)


# --- the demo
# --------------------------------------------------------------------------------------


def test_the_demo_trains_three_once_and_shows_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_anomaly_demo, "_CONFIGS", {"digits-knn": QUICK})
    _anomaly_demo._demo_main(["--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    metrics = json.loads((tmp_path / "out/digits-knn/anomaly.json").read_text())
    assert list(metrics["test"]) == ["Energy Transformer", "GCN", "MLP"] and {
        "commit",
        "config",
        "cores",
        "training_seconds",
    } <= set(metrics)
    assert (
        sorted(os.listdir(tmp_path / "out/digits-knn")) == ["anomaly.json", "run"]
        and os.listdir(tmp_path / "out") == ["digits-knn"]
        and printed.count("6/6") >= 3
    )
    for name, score in metrics["test"].items():
        assert re.search(
            rf"{name} +{score['auroc']:.3f} +{score['auprc']:.3f}"
            rf" +{score['macro_f1']:.3f}",
            printed,
        ), printed
    for module in (anomaly, _anomaly_demo):
        monkeypatch.setattr(
            module, "_train_classifier", without_training(module._train_classifier)
        )
    again = _anomaly_demo._demo(tmp_path / "out", progress=False)
    assert again["test"] == metrics["test"]
    graph = load_graph("digits-knn")
    for name in ("energy", "gcn", "mlp"):
        saved = _read_meta(tmp_path / "out/digits-knn/run" / name / "last.safetensors")[
            "config"
        ]
        assert (
            saved["train_fraction"] == 0.4 and saved["graph"]["digest"] == graph.digest
        )
    with monkeypatch.context() as patch:
        patch.setattr(
            _anomaly_demo,
            "load_graph",
            lambda name: replace(graph, labels=graph.labels[::-1]),
        )
        with pytest.raises(CheckpointError, match="energy: .*graph.digest"):
            _anomaly_demo._demo(tmp_path / "out", progress=False)
        patch.setattr(_anomaly_demo, "train_anomaly", lambda *args: None)
        with pytest.raises(CheckpointError, match="gcn: .*graph.digest"):
            _anomaly_demo._demo(tmp_path / "out", progress=False)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SystemExit):
        _anomaly_demo._demo_main(["--out", str(tmp_path / "file")])
    assert re.search(
        "argument --out: expected a folder, .*file", capsys.readouterr().err
    )


def without_training(train):
    never = lambda first: (
        pytest.fail("trained again") if first < QUICK.optim.steps else iter(())
    )
    return lambda *args, **options: train(*args, **options | {"batches": never})
