"""The scripts of experiments/: what they build and how they keep their runs."""

import functools
import importlib.util
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.testing import assert_close
from et_nbdev.training import fit
from et_nbdev.vision.data import batches
from et_nbdev.vision.train import evaluate, training_loss

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("compile_quickly")


def experiment(name):
    "The script of that name, as a module."
    spec = importlib.util.spec_from_file_location(name, ROOT / f"experiments/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ladder():
    return experiment("image_ladder")


def tiny(ladder):
    "A configuration and pictures that train in no time."
    model = replace(
        ladder.BASE.model,
        image_size=8,
        patch_size=2,
        dim=12,
        num_heads=2,
        head_dim=4,
        num_memories=16,
        steps=2,
    )
    optim = replace(ladder.BASE.optim, steps=4, warmup=1)
    sizes = dict(batch_size=4, validate_on=6, every=2)
    base = replace(ladder.BASE, model=model, optim=optim, **sizes)
    draw = np.random.default_rng(0).integers
    images = {
        "train": draw(0, 256, (20, 8, 8, 3), np.uint8),
        "validation": draw(0, 256, (8, 8, 8, 3), np.uint8),
    }
    return base, images


def test_both_ends_of_the_ladder_are_the_blocks_of_the_library(ladder):
    ladder.check()


def test_tied_rungs_are_special_cases_of_those_below(ladder, x64):
    c = tiny(ladder)[0].model
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 16, 12)))
    make = lambda name: ladder.Block(c, ladder.RUNGS[name], rngs=nnx.Rngs(0))

    def pair(below, above, **restricted):
        "Both with the weights of `above`; those it lacks, as `restricted` says."
        below, above = ladder.shaken(make(below)), ladder.shaken(make(above))
        for name in ("Wq", "Wk", "Wv", "Wo", "W1", "W2"):
            given = restricted.get(name, name)
            if hasattr(below, name):
                getattr(below, name)[...] = getattr(above, given)[...]
        if type(below.norm) is type(above.norm):
            below.norm = above.norm
        return below, above

    below, above = pair("parallel halves", "no biases")
    assert np.abs(below(x) - above(x)).max() > 0.01
    for name in ("bq", "bk", "bv", "bo", "b1", "b2"):
        getattr(below, name)[...] = jnp.zeros_like(getattr(below, name)[...])
    assert_close(below(x), above(x), rtol=1e-12)

    below, above = pair("no self-attention", "scalar norm")
    assert np.abs(below(x) - above(x)).max() > 0.01
    below.norm.scale[...] = jnp.full_like(below.norm.scale[...], above.norm.gamma)
    below.norm.bias[...] = above.norm.delta[...]
    assert_close(below(x), above(x), rtol=1e-4)  # their ε differ

    ties = dict(Wv="Wk", Wo="Wq")
    below, above = pair("tied MLP", "tied values", **ties)
    assert_close(below(x), above(x), rtol=1e-12)
    assert not any(hasattr(above, name) for name in ties)


def test_other_rungs_change_what_they_say(ladder, x64):
    c = tiny(ladder)[0].model
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 16, 12)))
    blocks = {
        name: ladder.shaken(ladder.Block(c, design, rngs=nnx.Rngs(0)))
        for name, design in ladder.RUNGS.items()
    }
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        below, above = blocks["transformer"], blocks["parallel halves"]
        g = above.norm(x)
        assert_close(above(x), x + above.attention(g) + above.mlp(g), rtol=1e-12)
        assert not hasattr(above, "norm2") and hasattr(below, "norm2")
        below, above = blocks["no biases"], blocks["no self-attention"]
        Q, K = np.random.default_rng(0).normal(size=(2, 2, 2, 16, 4))
        seen, scores = below.scores(Q, K), above.scores(Q, K)
        alone = np.eye(16, dtype=bool)
        assert np.isneginf(scores[..., alone]).all()
        assert_close(scores[..., ~alone], seen[..., ~alone], rtol=1e-12)
        below, above = blocks["scalar norm"], blocks["tied MLP"]
        recall = lambda h, W: jnp.einsum("bnk,kd->bnd", h, W[...])
        a = jnp.einsum("bnd,kd->bnk", g, above.W1[...])
        assert_close(above.mlp(g), recall(jax.nn.relu(a), above.W1), rtol=1e-12)
        assert not hasattr(above, "W2")
        a = jnp.einsum("bnd,kd->bnk", g, below.W1[...])
        assert_close(below.mlp(g), recall(jax.nn.gelu(a), below.W2), rtol=1e-12)


def test_all_designs_start_alike_and_cost_the_same(ladder):
    base = ladder.BASE.model
    sizes = [ladder.sized(base, design) for design in ladder.designs().values()]
    assert len(sizes) == 17
    assert {c.num_memories for c in sizes} == {480, 512, 576}
    costs = map(ladder.operations, sizes, ladder.designs().values())
    assert len(set(costs)) == 1
    c = tiny(ladder)[0].model
    first, *others = [
        ladder.Model(ladder.sized(c, design), design, rngs=nnx.Rngs(3))
        for design in ladder.RUNGS.values()
    ]
    start = dict(nnx.to_flat_state(nnx.state(first)))
    for model in others:
        for path, leaf in nnx.to_flat_state(nnx.state(model)):
            tied = model.design.tied_start and path[-1] == "Wk"
            same = start.get(("block", "Wq") if tied else path)
            if same is not None and same.shape == leaf.shape:
                np.testing.assert_array_equal(leaf[...], same[...], err_msg=path[-1])


def test_a_run_is_what_the_training_loop_of_the_library_makes(ladder):
    base, images = tiny(ladder)
    config = ladder.configured(images, base)
    design = ladder.designs()["7-key-term-zero"]
    row = ladder.run(config, design, 0.02, 1, images)
    sized = replace(config, model=ladder.sized(config.model, design))
    model = ladder.Model(sized.model, design, rngs=nnx.Rngs(1))
    score = lambda model: evaluate(
        model, images["validation"], config.num_occluded, limit=6
    )
    history = fit(
        model,
        training_loss(sized),
        lambda start: batches(images["train"], 4, seed=1, start=start),
        replace(config.optim, lr=0.02, lr_floor=0.02 * config.optim.lr_floor),
        seed=1,
        validate=lambda model: {"loss": score(model).mean()},
        every=2,
        progress=False,
    ).history
    scores = [(r["step"], r["validation_loss"]) for r in history]
    np.testing.assert_allclose(row["validation"], scores, rtol=1e-5)
    assert row["validation_mse"] == row["validation"][-1][1] != scores[0][1]
    assert row["config"]["optim"]["lr"] == 0.02 and row["config"]["seed"] == 1
    parameters = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert row["parameters"] == sum(p.size for p in parameters)


@pytest.fixture(scope="module")
def graph_terms():
    return experiment("graph_terms")


def a_graph(rng, N=9):
    from et_nbdev.graph.energy import EdgeIndex

    upper = np.triu(rng.random((N, N)) < 0.4, 1)
    return EdgeIndex(*np.nonzero(upper | upper.T), N)


def test_the_sum_over_edges_is_its_formula(graph_terms, x64):
    rng = np.random.default_rng(0)
    term = graph_terms.EdgeSum(6, 2, 4, rngs=nnx.Rngs(0))
    g, edges = jnp.asarray(rng.normal(size=(9, 6))), a_graph(rng)
    Q, K = (np.einsum("nd,hdy->nhy", g, W[...]) for W in (term.Wq, term.Wk))
    pairs = list(zip(*edges.edge_list()))
    E = 0.0
    for B, C in pairs:
        for h in range(2):
            E -= 0.5 * max(0.0, K[B, h] @ Q[C, h]) ** 2
    E /= len(pairs) / 9 * 4**0.5
    assert_close(term.energy(g, edges=(edges,)), E)


@pytest.mark.parametrize(
    "variant",
    ["as-found", "normalized-heads", "signs", "both", "edge-sum", "beside-edge-sum"],
)
def test_every_variant_on_graphs_descends_its_energy(graph_terms, x64, variant):
    from et_nbdev.graph.anomaly import AnomalyConfig

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


def test_only_the_steps_differ_from_the_detector_of_the_library(graph_terms):
    from et_nbdev.graph.anomaly import AnomalyConfig, AnomalyEnergyTransformer

    c = AnomalyConfig(
        dim=6, num_heads=2, head_dim=4, num_memories=5, steps=3, step_size=0.7
    )
    rng = np.random.default_rng(1)
    x, edges = jnp.asarray(rng.normal(size=(9, 3)), jnp.float32), (a_graph(rng),)
    plain, learned, heavy = (
        graph_terms.Detector(3, variant, c, 0)
        for variant in ("as-found", "learned-steps", "momentum")
    )
    library = AnomalyEnergyTransformer(3, c, rngs=nnx.Rngs(0))
    library.blocks = plain.blocks
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    close(plain(x, edges), library(x, edges))
    close(learned(x, edges), plain(x, edges))  # until it is trained
    heavy.blocks = plain.blocks  # by hand: every step repeats half of the last move
    (block,), start, move = plain.blocks, plain.encode(x), 0.0
    end = start
    for _ in range(3):
        force = block.update(block.norm(end), edges=edges[0])
        end, move = end + 0.5 * move + 0.7 * force, 0.5 * move + 0.7 * force
    read = jnp.concatenate([block.norm(start), block.norm(end)], -1)
    close(heavy(x, edges), plain.down(nnx.relu(plain.up(read))))
    of_steps = nnx.grad(lambda model: jnp.sum(model(x, edges)))(learned)["learned"]
    assert all(np.abs(slope).max() > 0 for slope in jax.tree.leaves(of_steps))


@pytest.fixture(scope="module")
def set_terms():
    return experiment("set_terms")


def a_weighted_graph(rng, N=9, H=2):
    from et_nbdev.graph.classify import WeightedEdges

    upper = np.triu(rng.random((N, N)) < 0.4, 1)
    senders, receivers = np.nonzero(upper | upper.T)
    linked = rng.random(len(senders)) < 0.8  # the others are padding
    weights = rng.normal(size=(H, len(senders)))
    return WeightedEdges(*map(jnp.asarray, (senders, receivers, linked, weights)))


def test_the_weighted_sum_over_edges_is_its_formula(set_terms, x64):
    rng = np.random.default_rng(0)
    term = set_terms.EdgeSum(6, 2, 4, rngs=nnx.Rngs(0))
    g, edges = jnp.asarray(rng.normal(size=(9, 6))), a_weighted_graph(rng)
    Q, K = (np.einsum("nd,hdy->nhy", g, W[...]) for W in (term.Wq, term.Wk))
    E = 0.0
    for e, (B, C) in enumerate(zip(edges.senders, edges.receivers)):
        for h in range(2):
            if edges.linked[e]:
                E -= 0.25 * edges.weights[h, e] * max(0.0, K[B, h] @ Q[C, h]) ** 2
    assert_close(term.energy(g, edges=edges), E)


@pytest.mark.parametrize("variant", ["as-found", "both", "both-beside-edge-sum"])
def test_every_variant_on_sets_descends_its_energy(set_terms, x64, variant):
    c = set_terms.FOUND | set_terms.VARIANTS[variant] | dict(dim=6, num_heads=2)
    rng = np.random.default_rng(1)
    block = set_terms.block(c, nnx.Rngs(0))
    edges = a_weighted_graph(rng)
    g = jnp.asarray(rng.normal(size=(9, 6)))
    E = lambda g: block.energies(g, edges=edges).total
    assert set(block.terms) == set(c["terms"])
    assert_close(block.update(g, edges=edges), -jax.grad(E)(g))


def test_a_variant_is_trained_on_a_fold_and_judged_by_its_hold_out(
    set_terms, monkeypatch
):
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
