"""The anomaly model, its loss and scores against their definitions, a training that
never looks at the test labels, and its commands.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sklearn.metrics import f1_score

from et_nbdev.dynamics import descend
from et_nbdev.graph import anomaly, kernels, nodes
from et_nbdev.graph import detector as commands
from et_nbdev.graph.anomaly import (
    AnomalyConfig,
    AnomalyEnergyTransformer,
    AnomalyTraining,
    SampleConfig,
    explain,
    load_anomaly_model,
    train_anomaly,
    weighted_loss,
)
from et_nbdev.graph.data import from_relations, load_graph, split
from et_nbdev.graph.nodes import (
    Batch,
    anomaly_scores,
    best_threshold,
    sample_nodes,
    sampled,
    scaled,
)
from et_nbdev.testing import assert_close
from et_nbdev.training import CheckpointError, OptimConfig

pytestmark = pytest.mark.usefixtures("compiled_once", "compile_quickly")
SMALL = AnomalyConfig(dim=8, num_heads=2, head_dim=4, num_memories=12, hidden=8)
QUICK = AnomalyTraining(
    model=SMALL, optim=OptimConfig(steps=6, warmup=0, lr=1e-2, lr_floor=1e-2), every=3
)


def toy(n=30, kinds=2):
    """A random graph with both directions of every edge, an isolated node, and two
    kinds of edges, with repetitions and loops.
    """
    rng, relations = np.random.default_rng(0), {}
    for kind in range(kinds):
        a, b = rng.integers(0, n - 1, (2, 2 * n))
        relations[f"kind{kind}"] = np.r_[a, b], np.r_[b, a]
    labels = (rng.random(n) < 0.3).astype(np.int8)
    x = rng.normal(size=(n, 5)).astype(np.float32)
    return from_relations(relations, x, labels, "toy")


def build(graph, config=SMALL):
    edges = AnomalyEnergyTransformer.prepare(graph, config.relations)
    y = jnp.asarray(scaled(graph, config.degree))
    options = dict(kinds=len(edges), rngs=nnx.Rngs(0))
    return AnomalyEnergyTransformer(y.shape[1], config, **options), y, edges


@pytest.fixture(scope="module")
def digits():
    return load_graph("digits-knn")


# --- the model, its loss and scores


@pytest.mark.parametrize("relations", ["merged", "max", "concat"])
def test_it_descends_and_reads_the_first_and_the_last_state(relations):
    "By hand; several kinds of edges have a block each."
    config = replace(SMALL, relations=relations, step_size=0.5)
    model, y, edges = build(toy(), config)
    assert len(model.blocks) == len(edges) == (1 if relations == "merged" else 2)
    reads = []
    for block, kind in zip(model.blocks, edges):
        x = model.encode(y)
        first = block.norm(x)
        for _ in range(2):
            x = x + 0.5 * block.update(block.norm(x), edges=kind)
        reads.append(jnp.concatenate([first, block.norm(x)], -1))
    pooled = jnp.stack(reads).max(0)
    read = jnp.concatenate(reads, -1) if relations == "concat" else pooled
    want = model.down(nnx.relu(model.up(read)))
    assert_close(model(y, edges), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads, memories", [(0, 12), (2, 0), (2, 12)])
def test_every_term_trains_and_is_explained(heads, memories):
    "Explanations add up to the energies of the block."
    config = replace(SMALL, num_heads=heads, num_memories=memories)
    model, y, edges = build(toy(kinds=1), config)
    grads = nnx.grad(lambda m: jnp.sum(m(y, edges) ** 2))(model)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads.blocks))
    why, (_, receivers) = explain(model, y, edges), edges[0].edge_list()
    assert why.edge_weights.shape == (len(receivers), heads)
    assert why.memories.shape == (30, memories)
    (block,), context = model.blocks, {"edges": edges[0]} if heads else {}
    end = descend(block, model.encode(y), 2, 1.0, **context)[0]
    energies = block.energies(block.norm(end), **context)
    for name, count in (("attention", heads), ("memory", memories)):
        share = getattr(why, f"{name}_energy").sum()
        assert_close(share, np.float32(energies[name] if count else 0), rtol=1e-4)
    if heads:
        paid = np.bincount(receivers, why.edge_weights[:, 0])
        assert np.abs(paid[np.unique(receivers)] - 1).max() < 1e-4


def test_dropout_is_for_training_alone():
    model, y, edges = build(toy(), replace(SMALL, dropout=0.5))
    assert np.array_equal(model(y, edges), model(y, edges))
    one, two = (model(y, edges, rngs=nnx.Rngs(dropout=seed)) for seed in (0, 1))
    assert not np.array_equal(one, two) and not np.array_equal(one, model(y, edges))


def test_the_loss_weighs_both_classes_alike():
    graph, some = toy(), np.arange(3, 25)
    model, y, edges = build(graph)
    l = graph.labels[some].astype(np.int32)
    p = np.asarray(jax.nn.softmax(model(y, edges)), np.float64)[some]
    weight = np.where(l == 1, (l == 0).sum() / (l == 1).sum(), 1)
    want = -(weight * np.log(p[np.arange(22), l])).sum() / weight.sum()
    batch = Batch(y, edges, jnp.asarray(some), jnp.asarray(l))
    found = weighted_loss(model, batch, jax.random.key(0))[0]
    assert_close(found, np.float32(want), rtol=1e-5)


def test_scores_on_a_case_done_by_hand():
    l, p = np.array([0, 1, 0, 1]), np.array([0.1, 0.4, 0.6, 0.9])
    # one of each cell of the confusion matrix: F1 is 1/2 for both classes
    got = anomaly_scores(l, p, 0.5)
    assert got["macro_f1"] == got["precision_at_k"] == 0.5 and got["auroc"] == 0.75
    at = (anomaly_scores(l, p, 0.5, k)["precision_at_k"] for k in (1, 3, 9))
    assert [*at] == [1, 2 / 3, 0.5]
    assert got["auprc"] == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert best_threshold(l, p) == 0.9  # 0.733; at 0.4, 0.6 and 0.1 it is less
    q, m = np.random.default_rng(0).random((2, 200))
    m = (m < q / 2).astype(int)
    at = lambda theta: f1_score(m, q >= theta, average="macro")
    assert best_threshold(m, q) == max(q, key=at)
    with pytest.raises(ValueError, match=r"anomalous.*got \[0\]"):
        anomaly_scores(np.zeros(4, int), p, 0.5)


# --- training


def test_training_repeats_and_never_looks_at_the_test_labels(digits, tmp_path):
    "A finished run is found, and reported as it was, under another name of the graph."
    one, again, found = (
        train_anomaly(QUICK, replace(digits, name=name), folder, progress=False)
        for name, folder in (("", None), ("", tmp_path), ("moved", tmp_path))
    )
    assert np.array_equal(one.p, again.p) and np.array_equal(one.p, found.p)
    assert one.test == again.test == found.test
    parts = split(digits.labels, QUICK.train_fraction, QUICK.seed)
    labels = digits.labels.copy()
    labels[parts.test] = 1 - labels[parts.test]
    flipped = replace(digits, labels=labels)
    other = train_anomaly(QUICK, flipped, progress=False, parts=parts)
    assert np.array_equal(one.p, other.p) and one.test != other.test
    assert (one.threshold, one.validation) == (other.threshold, other.validation)
    # other data: least of all where corrected labels have made test nodes of known ones
    for changed in (flipped, replace(digits, features=digits.features[::-1])):
        says = f"{tmp_path}: .*graph.digest: '{digits.digest}' there"
        with pytest.raises(CheckpointError, match=says):
            train_anomaly(QUICK, changed, tmp_path, progress=False)


# --- parts of a graph


def chain(kinds, one_way, n=120):
    """Nodes in a circle, each seen from one and three places on, and from as far back
    unless `one_way`: nothing is near to everything.
    """
    rng, i = np.random.default_rng(2), np.arange(n)
    ends = [(np.r_[i, i], np.r_[(i + 1) % n, (i + 3 + k) % n]) for k in range(kinds)]
    if not one_way:
        ends = [(np.r_[s, r], np.r_[r, s]) for s, r in ends]
    relations = {f"kind{k}": e for k, e in enumerate(ends)}
    labels = (rng.random(n) < 0.3).astype(np.int8)
    return from_relations(relations, rng.normal(size=(n, 5)), labels, "chain")


@nnx.jit
def loss_and_logits(model, batch):
    logits = model(batch.features, batch.edges)[batch.nodes]
    return weighted_loss(model, batch, jax.random.key(0))[0], logits


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
    graph = chain(2 if relations == "concat" else 1, one_way)
    model, y, edges = build(graph, replace(SMALL, relations=relations, degree=False))
    assert edges[0].backend == backend
    seeds, labels = np.array([7, 60, 61]), jnp.asarray([0, 1, 0])
    want = loss_and_logits(model, Batch(y, edges, jnp.asarray(seeds), labels))
    # two a step: whom I see, and whom those who see me see
    for hops, exact in ((SMALL.steps, False), (2 * SMALL.steps, True)):
        ball = seeds
        for _ in range(hops):
            both = graph.edges, graph.edges[::-1]
            near = [b[np.isin(a, ball)] for a, b in both]
            ball = np.unique(np.concatenate([ball, *near]))
        config, rng = SampleConfig(3, len(ball), 50), np.random.default_rng(0)
        some, part = sample_nodes(edges, seeds, config, rng)
        assert np.array_equal(np.sort(some), ball) and len(ball) < graph.num_nodes
        assert np.array_equal(some[:3], seeds)
        got = loss_and_logits(model, Batch(y[some], part, jnp.arange(3), labels))
        off = max(float(jnp.abs(a - b).max()) for a, b in zip(got, want))
        assert (off < 1e-4) == exact, (hops, off)


def test_a_part_is_drawn_at_random_from_the_graph_and_keeps_its_size(digits):
    edges = AnomalyEnergyTransformer.prepare(digits)
    has = set(zip(*(ends.tolist() for ends in digits.edges)))
    seeds, seen, shapes = np.array([5, 900, 1700]), [], set()
    draw = lambda config, seed=0, edges=edges: sample_nodes(
        edges, seeds, config, np.random.default_rng(seed)
    )
    for seed in range(3):
        some, (part,) = draw(SampleConfig(3, 100, 4), seed)
        senders, receivers = part.edge_list()
        assert len(np.unique(some)) == 100 and np.array_equal(some[:3], seeds)
        assert set(zip(some[senders].tolist(), some[receivers].tolist())) <= has
        inside = np.isin(digits.senders, some) & np.isin(digits.receivers, some)
        degrees = np.bincount(digits.receivers[inside], minlength=1797)[some]
        kept = np.bincount(receivers, minlength=100)
        assert np.array_equal(kept, np.minimum(degrees, 4))
        seen.append(set(some.tolist()))
        shapes.add(tuple(leaf.shape for leaf in jax.tree.leaves(part)))
    assert len(shapes) == 1 and seen[0] != seen[1] != seen[2]
    assert len(draw(SampleConfig(3, 5000, 4))[0]) == 1797  # no larger than the graph
    ends = dict(senders=np.array([5, 1]), receivers=np.array([1, 5]), relations={})
    alone = AnomalyEnergyTransformer.prepare(replace(digits, **ends))
    some, (part,) = draw(SampleConfig(3, 12, 3), edges=alone)
    assert len(np.unique(some)) == 12 and 1 in some and part.num_edges == 2


def test_batches_keep_both_classes_and_depend_on_their_number_alone(digits):
    parts, y = split(digits.labels, 0.4, 0), scaled(digits)
    edges = AnomalyEnergyTransformer.prepare(digits)
    of = lambda *sizes: sampled(
        y, edges, digits.labels, parts.train, SampleConfig(*sizes), seed=1
    )
    batches = of(50, 200, 4)
    first = [batch for batch, _ in zip(batches(0), range(4))]
    for pair in zip(first[2:], batches(2)):
        assert all(map(np.array_equal, *map(jax.tree.leaves, pair)))
    for batch in first:
        assert batch.labels.sum() == 5 and len(batch.labels) == 50  # as 10 % of them
        assert batch.features.shape == (200, y.shape[1])
    assert not np.array_equal(first[0].features, first[1].features)
    with pytest.raises(ValueError, match="seeds: .* the 719 training nodes, got 800"):
        of(800, 900)


def test_training_on_parts_compiles_once(monkeypatch, digits):
    "Through XLA, too, where a table of pairs takes the place of the edges."
    short = replace(QUICK, sample=SampleConfig(40, 120, 4))
    traced = []
    loss = lambda *args: traced.append(1) or weighted_loss(*args)
    monkeypatch.setattr(anomaly, "weighted_loss", loss)
    for graph, xla in ((digits, False), (toy(200), True)):
        if xla:
            monkeypatch.setattr(kernels, "available", lambda: False)
        run = train_anomaly(short, graph, progress=False)
        assert np.isfinite(run.p).all() and len(traced) == 1
        traced.clear()


# --- what is refused


def test_features_and_edges_that_do_not_fit_are_named():
    model, y, edges = build(toy())
    for call in (model, lambda *args: explain(model, *args)):
        for bad in ((y[:, :5], edges), (y, edges * 2)):
            with pytest.raises(
                ValueError, match=r"^features, edges: .*\(N, 6\), and 1"
            ):
                call(*bad)
        with pytest.raises(ValueError, match="^edges: .* N = 29, got 30"):
            call(y[:29], edges)


@pytest.mark.parametrize(
    "model, change, says",
    [
        ({}, dict(senders=[], receivers=[]), "no edges"),
        (dict(relations="max"), {}, "one kind"),
        ({}, dict(labels=np.zeros(1797, int)), "both classes"),
    ],
)
def test_a_graph_that_cannot_be_trained_on_is_refused(model, change, says, digits):
    config = replace(QUICK, model=replace(SMALL, **model))
    with pytest.raises(ValueError, match=says):
        train_anomaly(config, replace(digits, **change), progress=False)


# --- et_train_anomaly

TINY = "--model.dim 8 --model.num_heads 2 --model.head_dim 4 --model.num_memories 12"
TINY += " --model.hidden 8 --optim.steps 6 --optim.warmup 1 --every 3"
TINY = TINY.split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    "(folder, metrics) of a tiny run on two splits."
    out = tmp_path_factory.mktemp("cli") / "deep" / "run"
    commands.train([*TINY, "--splits", "2", "--seed", "3", "--out", str(out)])
    return out, json.loads((out / "metrics.json").read_text())


def test_a_report_is_of_the_best_weights_on_every_split(run, digits):
    out, metrics = run
    assert sorted(os.listdir(out)) == ["metrics.json", "seed-3", "seed-4"]
    files = "best.safetensors detector.safetensors last.safetensors metrics.jsonl"
    assert metrics["config"]["model"]["dim"] == 8 and metrics["config"]["seed"] == 3
    about = {"commit", "device", "cores", "jax", "date", "training_seconds"}
    assert about <= set(metrics) and metrics["data"] == "digits-knn"
    for row, seed in zip(metrics["runs"], (3, 4), strict=True):
        folder = out / f"seed-{seed}"
        assert sorted(os.listdir(folder)) == files.split() and row["seed"] == seed
        parts = split(digits.labels, 0.4, seed)
        assert row["parts"] == {name: len(i) for name, i in parts._asdict().items()}
        model = load_anomaly_model(folder / "best.safetensors")
        logits = model(jnp.asarray(scaled(digits)), model.prepare(digits))
        p = np.asarray(jax.nn.softmax(logits)[:, 1])[parts.test]
        own = anomaly_scores(digits.labels[parts.test], p, row["threshold"])
        assert own == pytest.approx(row["test"], abs=0.01)
    for score in ("macro_f1", "auroc", "auprc", "precision_at_k"):
        a, b = (row["test"][score] for row in metrics["runs"])
        assert metrics["test"][score] == pytest.approx((a + b) / 2)
        assert metrics["deviation"][score] == pytest.approx(abs(a - b) / 2**0.5)
        for name, row in metrics["report"].items():
            a, b = (row["report"][name][score] for row in metrics["runs"])
            assert row[score] == pytest.approx((a + b) / 2)


def test_run_again_it_finishes_at_once(run, capsys):
    out, metrics = run
    before = {path: path.read_bytes() for path in out.glob("*/*")}
    commands.train([*TINY, "--splits", "2", "--seed", "3", "--out", str(out)])
    assert json.loads((out / "metrics.json").read_text())["runs"] == metrics["runs"]
    assert before == {path: path.read_bytes() for path in out.glob("*/*")}
    printed = capsys.readouterr().out
    assert "over 2 splits" in printed and "Split 2 of 2 (seed 4)" in printed
    for score, mean in metrics["test"].items():
        assert f"{score:<15}{mean:.4f} ± {metrics['deviation'][score]:.4f}" in printed
    for name, row in metrics["report"].items():
        assert f"{name:<30}{row['auprc']:8.3f}{row['auroc']:8.3f}  " in printed
    told = nodes.advice(metrics["report"])
    assert told and told in printed and "chosen on validation" in printed


def test_options_reach_the_configuration(monkeypatch):
    seen = []
    monkeypatch.setattr(commands, "load_graph", lambda name: name)
    monkeypatch.setattr(commands, "report", lambda *args, time: seen.append(args))
    argv = "--config amazon --data amazon-upu --model.degree false --model.beta 0.5"
    commands.train([*argv.split(), "--splits", "5", "--out", "x"])
    base = commands.CONFIGS["amazon"]
    model = replace(base.model, degree=False, beta=0.5)
    want = replace(base, data="amazon-upu", model=model)
    assert seen.pop() == (want, "amazon-upu", Path("x"), 5)
    commands.train(["--out", "x"])  # as AnomalyDetector() in Python
    assert seen == [(AnomalyTraining(), "digits-knn", Path("x"), 1)]


# --- et_demo_graphs


def test_the_demo_is_a_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(commands, "CONFIGS", {"digits-knn": QUICK})
    seen = []
    monkeypatch.setattr(commands, "report", lambda *args: seen.append(args))
    commands.demo(["--out", str(tmp_path)])
    ((config, graph, out),) = seen
    assert (config, graph.name) == (QUICK, "digits-knn")
    assert out == tmp_path / "digits-knn" and f"{out}/" in capsys.readouterr().out
