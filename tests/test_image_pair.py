"""experiments/image_pair.py and image_terms.py: what they compare, and how their runs
are kept.
"""

import importlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.solvers import LearnedMetric
from et_nbdev.testing import assert_close, assert_descends, assert_gradient
from et_nbdev.training.checkpoint import load_checkpoint, read_meta
from et_nbdev.training.loop import OptimConfig
from et_nbdev.vision.data import load_images
from et_nbdev.vision.model import ImageConfig, load_model
from et_nbdev.vision.train import TrainConfig, completion_loss, drawn_batch

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("compiled_once", "compile_quickly")
D, H, Y, K, N = 8, 2, 4, 32, 16
rng = np.random.default_rng(0)
PICTURES = {
    "train": rng.integers(0, 256, (20, 8, 8, 3), np.uint8),
    "validation": rng.integers(0, 256, (6, 8, 8, 3), np.uint8),
    "test": rng.integers(0, 256, (5, 8, 8, 3), np.uint8),
}


@pytest.fixture(scope="module")
def modules():
    return {
        name: importlib.import_module(name)
        for name in (
            "image_pair",
            "image_lanes",
            "image_downhill",
            "packed_pictures",
            "image_terms",
        )
    }


@pytest.fixture
def pair(modules, monkeypatch):
    "The script, with a size that trains in no time."
    pair = modules["image_pair"]
    tiny = dict(dim=D, num_heads=H, head_dim=Y, num_memories=K, steps=2)
    start = dict(position_init="waves", position_scale=2.0, step_size=1.0)
    monkeypatch.setitem(pair.SIZES, "tiny", ImageConfig(**tiny, **start))
    monkeypatch.setitem(pair.DATA, "generated", (8, 2))
    return pair


def plan_of(pair, **changes):
    sizes = dict(size="tiny", data="generated", batch_size=4, validate_on=6)
    steps = dict(trial_steps=2, steps=6, longer=2, seeds=(0, 1))
    return pair.Plan(**{**sizes, **steps, **changes})


def shaken(tree, seed=0):
    "All parameters in double precision, moved off their start."
    draw = np.random.default_rng(seed).normal
    move = lambda p: jnp.asarray(np.asarray(p) + 0.1 * draw(size=p.shape))
    return jax.tree.map(move, tree)


# --- what is compared


@pytest.mark.parametrize("size", ["small", "medium", "base"])
def test_the_comparisons_are_fair(pair, size):
    base = pair.Plan(size=size).base
    sizes = {name: pair.sized(base, name) for name in pair.NAMES}
    opponent = sizes["transformer"]
    narrower = ["et-paper-operations"]
    if size == "base":  # twelve matrices leave no room for memories
        narrower.append("et-maps-parameters")
    for name, c in sizes.items():
        if name.endswith("operations"):
            assert abs(pair.operations(c, name) / opponent.flops - 1) < 0.01, name
        else:
            goal = pair.parameters(opponent, "transformer")
            assert abs(pair.parameters(c, name) / goal - 1) < 0.01, name
        assert (c.num_tokens, c.num_heads) == (64, base.num_heads)
        assert c.num_memories >= c.dim
        assert c.dim == base.dim or name in narrower
    assert sizes["et-paper-parameters"].steps == 12
    assert {c.steps for n, c in sizes.items() if "paper" not in n} == {base.steps}


@pytest.mark.parametrize(
    "name",
    [
        "et",
        "et-metric",
        "et-maps",
        "et-gelu",
        "transformer",
        "transformer-gated",
        "transformer-maps",
        "hyperset",
        "hyperset-true",
    ],
)
def test_operations_are_those_the_compiler_counts(pair, name):
    changes = dict(dim=64, num_heads=4, head_dim=16, num_memories=256)
    # so that their map is no small part
    if name in ("et-metric", "et-maps", "et-gelu", *pair.MAPPED):
        changes = dict(dim=256, num_heads=2, head_dim=16, num_memories=64)
    c = replace(pair.Plan(size="tiny").base, **changes)
    c = pair.DESIGNS[name][1](c)
    model = pair.make(c, name)
    graphdef, params = nnx.split(model)
    patches = jnp.zeros((2, c.num_tokens, c.patch_dim), jnp.float32)
    masked = jnp.zeros((2, c.num_tokens), bool)
    forward = jax.jit(lambda params: nnx.merge(graphdef, params)(patches, masked))
    counted = forward.lower(params).compile().cost_analysis()["flops"] / 2
    assert 0.85 * counted < pair.operations(c, name) <= counted


def test_the_long_runs_come_last(pair):
    jobs = pair.finals({}, plan_of(pair, lr=0.01), pair.NAMES, 6)
    assert [job.steps for job in jobs] == sorted(job.steps for job in jobs)
    assert [job.name for job in jobs if job.steps == 12] == list(pair.LONG)
    assert "et-metric-operations" in pair.LONG


def test_every_part_of_a_model_is_trained(pair):
    plan = plan_of(pair)
    patches = jnp.asarray(rng.normal(size=(3, N, 12)), jnp.float32)
    masked = jnp.asarray(rng.random((3, N)) < 0.5)
    for name in (
        "et-operations",
        "et-metric-operations",
        "et-maps-operations",
        "et-gelu-operations",
        "transformer-gated-operations",
        "transformer-maps-operations",
        "hyperset-operations",
        "hyperset-true-operations",
    ):
        c = pair.sized(plan.base, name)
        model = pair.make(c, name)
        if name.startswith("hyperset-op"):  # whose step sizes start at zero
            kernel = model.block.sizes.kernel
            kernel[...] = 0.1 * jax.random.normal(jax.random.key(0), kernel.shape)
        for part in (getattr(model, "solver", None), getattr(model, "metric", None)):
            if isinstance(part, LearnedMetric):  # whose map starts at zero
                W = part.W
                W[...] = 0.1 * jax.random.normal(jax.random.key(0), W.shape)
        loss = lambda model: jnp.mean((model(patches, masked) - patches) ** 2)
        value, grads = nnx.jit(nnx.value_and_grad(loss))(model)
        assert np.isfinite(value)
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(grads)):
            assert np.isfinite(leaf).all() and np.any(leaf), (name, path)
        params = jax.tree.leaves(nnx.state(model, nnx.Param))
        assert pair.parameters(c, name) == sum(p.size for p in params)


@pytest.mark.parametrize("of", ["gated", "maps"])
def test_factors_start_where_the_transformer_does(pair, of):
    "And are then what they say, by one map or by one for every step."
    c = replace(plan_of(pair).base, relative_positions="zero", block="transformer")
    patches = jnp.asarray(rng.normal(size=(3, N, 12)), jnp.float32)
    masked = jnp.asarray(rng.random((3, N)) < 0.5)
    plain, gated = (pair.make(c, name) for name in ("transformer", f"transformer-{of}"))
    assert_close(gated(patches, masked), plain(patches, masked), rtol=1e-5)
    s = gated.metric
    for p in (s.log_alpha, s.c, s.W):
        p[...] = jnp.asarray(rng.normal(size=p.shape), jnp.float32)
    x = gated.encode(patches, masked)
    for t in (0, 1, 1):  # steps beyond T = 2 are as the last
        W = s.W[t] if of == "maps" else s.W[...]
        logits = gated.block.norm1(x) @ W.T
        a = jax.nn.sigmoid(logits + jnp.broadcast_to(s.c[...][t], x.shape))
        x = x + jnp.exp(s.log_alpha[...])[t] * a * (gated.block(x) - x)
    assert_close(gated.descend(patches, masked, steps=3)[0], x, rtol=1e-5)


@pytest.mark.parametrize("name", ["et-metric-operations", "et-maps-operations"])
def test_the_first_step_is_the_pull_of_the_energy(pair, name):
    patches = jnp.asarray(rng.normal(size=(3, N, 12)), jnp.float32)
    masked = jnp.asarray(rng.random((3, N)) < 0.5)
    c = pair.sized(plan_of(pair).base, name)
    model = pair.make(c, name)
    x = model.encode(patches, masked)
    step = model.descend(patches, masked, steps=1)[0] - x
    norm, u = model.block.norm, model.block.update(model.block.norm(x))
    assert_close(step, norm.turning(x, u), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["et-operations", "transformer"])
def test_a_loop_and_all_steps_at_once_are_the_same(pair, monkeypatch, name):
    model = pair.make(pair.sized(plan_of(pair).base, name), name)
    patches = jnp.asarray(rng.normal(size=(3, N, 12)), jnp.float32)
    masked = jnp.asarray(rng.random((3, N)) < 0.5)
    at_once = model(patches, masked)
    monkeypatch.setattr(pair, "_looped", lambda: 1)
    np.testing.assert_allclose(model(patches, masked), at_once, atol=1e-5)


def test_the_energy_transformer_has_all_options(pair):
    c = pair.sized(pair.Plan().base, "et-operations")
    model = pair.make(c, "et-operations")
    attention, memory = model.block.attention, model.block.memory
    np.testing.assert_allclose(attention.beta, 4 / 32**0.5, rtol=1e-6)
    assert attention.log_beta.shape == (4,) and attention.normalize
    np.testing.assert_array_equal(attention.Wq[...], attention.Wk[...])
    assert attention.positions.table[0, 0, 0] < 0
    assert memory.num_negative == round(c.num_memories / 4)
    # of which the gate lets half pass
    np.testing.assert_allclose(jnp.exp(model.solver.log_alpha[...]), 2.0, rtol=1e-6)
    assert not model.solver.w[...].any() and not model.solver.b[...].any()


def test_what_starts_small(pair):
    "Memories, at 1/√K."
    base = pair.Plan().base
    for name in ("et-small-operations", "et-small-parameters"):
        c = pair.sized(base, name)
        xi = pair.make(c, name).block.memory.xi[...]
        np.testing.assert_allclose(xi.std() * c.num_memories**0.5, 1, rtol=0.02)


# --- Hyper-SET


def test_the_true_gradient_is_one_and_the_published_step_is_none(pair, x64):
    c = replace(pair.sized(plan_of(pair).base, "hyperset-operations"), num_memories=K)
    published = shaken(pair.make(c, "hyperset").block)
    for gain in (published.head_gain, published.hidden_gain):
        gain[...] = jnp.ones_like(gain[...])
    true = shaken(pair.make(c, "hyperset-true").block)
    true.attention, true.memory = published.attention, published.memory
    g = jnp.asarray(rng.normal(size=(2, 5, D)))
    energies, update = true.energies_and_update(g)
    assert_gradient(true.energy, g, -update)
    pulls = published.pulls(g)
    steps = dict(attention=pulls[0], memory=-pulls[1])
    for name, step in steps.items():
        term = true.terms[name]
        assert_gradient(term.energy, g, -term.update(g))
        with pytest.raises(AssertionError, match="largest error"):
            assert_gradient(term.energy, g, step)
        cosine = jnp.sum(step * -term.update(g)) / jnp.sqrt(
            jnp.sum(step**2) * jnp.sum(term.update(g) ** 2)
        )
        assert 0 < cosine < 0.95  # downhill, but another way


def test_the_published_step_is_the_gradient_before_the_norm(pair, x64):
    "As derived in the paper: by the normalized tokens, and back through W alone."
    c = replace(pair.sized(plan_of(pair).base, "hyperset-operations"), num_memories=K)
    block = shaken(pair.make(c, "hyperset").block)
    for gain in (block.head_gain, block.hidden_gain):
        gain[...] = jnp.ones_like(gain[...])
    x = jnp.asarray(rng.normal(size=(5, D)))
    W = block.attention.W[...]

    def attention(w):
        s = jnp.einsum("hay,hby->hab", w, w) / Y**0.5
        return Y**0.5 * jnp.sum(jax.nn.logsumexp(s, -1))

    w = pair.rms(jnp.einsum("nd,hdy->hny", x, W))
    expected = jnp.einsum("hny,hdy->nd", jax.grad(attention)(w), W)
    assert_close(block.attend(x), expected)
    h = pair.rms(x @ block.memory.W[...].T)
    pull = jax.grad(lambda h: jnp.sum(jax.nn.relu(h) ** 2) / 2)(h)
    assert_close(block.recall(x), pull @ block.memory.W[...])


def test_published_step_sizes_start_at_zero_and_see_the_step(pair):
    c = pair.sized(plan_of(pair).base, "hyperset-operations")
    block = pair.make(c, "hyperset").block
    x = jnp.asarray(rng.normal(size=(2, N, D)), jnp.float32)
    np.testing.assert_array_equal(block(x, x, 0), x)
    kernel = block.sizes.kernel
    kernel[...] = jax.random.normal(jax.random.key(0), kernel.shape)
    sizes = [block.step_sizes(x, t)[0] for t in (0, 1)]
    assert sizes[0].shape == x.shape and np.abs(sizes[0] - sizes[1]).max() > 1e-2
    assert sizes[0].min() < 0 < sizes[0].max()
    a, b = block.step_sizes(x, 1)
    y = x - a * block.attend(x)
    np.testing.assert_allclose(block(x, x, 1), y + b * block.recall(y), rtol=1e-5)


# --- runs


class Interrupted:
    "A clock whose time is up after some steps."

    def __init__(self, steps):
        self.left = steps

    @property
    def up(self):
        return self.left <= 0

    def __call__(self, run):
        self.left -= 1
        run.stop |= self.up


def numbers(row):
    "What of a run does not depend on the time it took."
    curve = [{k: v for k, v in r.items() if k != "seconds"} for r in row["curve"]]
    return row["validation_mse"], row["best_step"], curve


def test_a_run_that_is_stopped_ends_in_the_same_numbers(pair, tmp_path):
    plan = plan_of(pair, steps=5)
    job = pair.Job("et-operations", 5, 0.01, 1)
    whole = pair.run(plan, job, PICTURES, tmp_path / "whole", pair.Clock())
    assert pair.run(plan, job, PICTURES, tmp_path / "cut", Interrupted(2)) is None
    assert (tmp_path / "cut/last.safetensors").exists()
    assert pair.run(plan, job, PICTURES, tmp_path / "cut", Interrupted(2)) is None
    again = pair.run(plan, job, PICTURES, tmp_path / "cut", pair.Clock())
    assert numbers(again) == numbers(whole)
    weights = [load_model(tmp_path / f / "best.safetensors") for f in ("whole", "cut")]
    leaves = [jax.tree.leaves(nnx.state(model, nnx.Param)) for model in weights]
    for a, b in zip(*leaves):
        np.testing.assert_array_equal(a[...], b[...])
    # the model has learned steps, and descends by them
    assert weights[0].solver.log_alpha.shape == (2,)
    patches = jnp.asarray(rng.normal(size=(5, N, 12)), jnp.float32)
    path = weights[0].descend(patches, jnp.asarray(rng.random((5, N)) < 0.5))[1]
    assert_descends(path.energies.total, rtol=1e-5)
    # what a file has to say
    assert whole.pop("test_errors").shape == (5,)
    json.loads(json.dumps(whole, allow_nan=False))
    assert whole["config"]["seed"] == 1 and whole["config"]["optim"]["lr"] == 0.01
    assert whole["curve"][-1]["pictures"] == 20 and whole["commit"]
    assert whole["operations"] == weights[0].config.flops
    assert [r["pictures"] for r in whole["curve"] if "validation" in r][-1] == 20


def test_runs_of_another_weight_decay_are_kept_apart(pair):
    job = pair.Job("et-operations", 6, 0.01, 0)
    plans = [plan_of(pair), plan_of(pair, weight_decay=0.0)]
    decays = [pair.configured(p, job, PICTURES).optim.weight_decay for p in plans]
    assert decays == [0.05, 0.0]
    assert plans[1].kind == f"{plans[0].kind}-decay-0"
    assert job.file(plans[1]) != job.file(plans[0])


def test_a_run_that_diverges_says_so(pair, tmp_path):
    job = pair.Job("transformer", 3, 1e30, 0)
    row = pair.run(plan_of(pair), job, PICTURES, tmp_path, pair.Clock())
    assert pair.score(row) == float("inf") and "not" not in row["diverged"][:3]
    json.loads(json.dumps(row, allow_nan=False))


def test_a_full_run_is_scored_on_the_test_split_when_it_ends(
    pair, tmp_path, monkeypatch
):
    plan = plan_of(pair, seeds=(0,), longer=0, lr=0.01, steps=3)
    out, runs = tmp_path / "out", tmp_path / "runs"
    names = ["et-operations", "transformer"]
    assert not pair.work(plan, names, out, runs, PICTURES, pair.Clock(), limit=1)
    assert pair.work(plan, names, out, runs, PICTURES, pair.Clock())
    stems = {f"generated-tiny-4-{n}-3-0.01-0" for n in names}
    files = {p.name for p in out.iterdir()}
    assert files == {f"{stem}.{end}" for stem in stems for end in ("json", "npy")}
    for job, row in pair.read(out, plan).items():
        errors = np.load(out / f"{job.file(plan)}.npy")
        assert errors.shape == (5,)
        assert row["test_mse"] == pytest.approx(errors.mean(), rel=1e-3)
        # of the weights that were best on validation
        model = pair.make(ImageConfig(**row["config"]["model"]), job.name)
        like = {"params": nnx.to_pure_dict(nnx.state(model, nnx.Param))}
        found, _ = load_checkpoint(runs / job.file(plan) / "best.safetensors", like)
        nnx.update(model, found["params"])
        config = TrainConfig(model.config)
        score = pair.score_of(model, config, PICTURES["test"])
        np.testing.assert_allclose(errors, score, rtol=1e-3)
        if job.name == "transformer":
            assert "steps_up" not in row
        else:
            assert row["steps_observed"] == model.config.steps * 6
            assert row["steps_up"] == 0
    # a trial does not look
    job = pair.Job("transformer", plan.trial_steps, 0.01, 0)
    row = pair.run(plan, job, PICTURES, tmp_path / "trial", pair.Clock())
    assert row["validation_mse"] and not any("test" in key for key in row)
    before = {path: path.read_bytes() for path in out.iterdir()}  # nothing is made again
    assert pair.work(plan, names, out, runs, PICTURES, pair.Clock())
    assert before == {path: path.read_bytes() for path in out.iterdir()}


def test_the_order_of_the_runs(pair, monkeypatch):
    monkeypatch.setattr(pair, "LEARNING_RATES", (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2))
    monkeypatch.setattr(pair, "first_rate", lambda plan, name: 4e-3)
    errors = {
        "et-operations": {4e-3: 0.3, 8e-3: 0.2, 1.6e-2: 0.1},
        "transformer": {2e-3: 0.3, 4e-3: 0.2, 8e-3: None, 1.6e-2: 0.5},
    }
    plan = plan_of(pair, trial_steps=5, steps=9, longer=4, seeds=(0, 1))
    done, order = {}, []
    while job := pair.next_job(done, plan, tuple(errors), 9):
        short = job.steps == 5
        done[job] = {"validation_mse": errors[job.name][job.lr] if short else 0.1}
        order.append((job.name[0], job.steps, job.lr, job.seed))
    # until the best is not at an edge of those tried (or the grid ends) …
    trials = [row for row in order if row[1] == 5]
    assert trials == order[: len(trials)] and {row[3] for row in trials} == {0}
    rates = {n: [row[2] for row in trials if row[0] == n] for n in "et"}
    assert rates["e"] == [4e-3, 8e-3, 1.6e-2] and rates["t"][:3] == [4e-3, 8e-3, 2e-3]
    # … as many for every model
    assert len(rates["e"]) == len(rates["t"])
    best = {"e": 1.6e-2, "t": 4e-3}
    assert order[len(trials) :] == [
        *((n, 9, best[n], seed) for seed in (0, 1) for n in "et"),
        *((n, 36, best[n], 0) for n in "et"),
    ]


def test_other_models_get_as_many_trials(pair, monkeypatch):
    monkeypatch.setattr(pair, "first_rate", lambda plan, name: pair.LEARNING_RATES[8])
    goal = {"et-operations": 12, "transformer": 8}  # where each is best
    plan, done = plan_of(pair), {}
    while job := pair.next_trial(done, plan, tuple(goal)):
        away = pair.LEARNING_RATES.index(job.lr) - goal[job.name]
        done[job] = {"validation_mse": away**2}
    rates = {name: pair.rates(done, plan, name) for name in goal}
    assert len(rates["et-operations"]) == len(rates["transformer"]) == 6
    for name, at in goal.items():
        tried = {pair.LEARNING_RATES.index(rate) for rate in rates[name]}
        assert {at - 1, at, at + 1} <= tried and next(iter(rates[name].values())) == 0
        assert tried == set(range(min(tried), max(tried) + 1))


def test_as_a_command(pair, tmp_path, capsys):
    pytest.importorskip("sklearn")
    common = ["--size", "tiny", "--data", "digits", "--only", "transformer-plain"]
    common += [
        "--trial-steps",
        "2",
        "--steps",
        "3",
        "--batch-size",
        "8",
        "--lr",
        "0.01",
    ]
    common += ["--seeds", "0", "--longer", "0", "--validate-on", "20"]
    places = [f"--out={tmp_path / 'out'}", f"--runs={tmp_path / 'runs' / 'pair'}"]
    pair.main([*common, "--sizes"])
    assert "| transformer-plain | 8 | 32 | 2 |" in capsys.readouterr().out
    pair.main([*common, *places, "--budget", "0"])
    assert not list(tmp_path.glob("out/*"))
    pair.main([*common, *places])
    assert "digits-tiny-8-transformer-plain-3-0.01-0" in capsys.readouterr().out
    pair.main([*common, *places, "--summary"])
    assert "| transformer-plain |" in capsys.readouterr().out


def test_steps_that_raise_the_energy_are_counted(pair):
    tokens = dict(image_size=8, patch_size=2, dim=16, num_heads=2, head_dim=8)
    plain = ImageConfig(**tokens, num_memories=32, steps=8)
    # all memories push tokens away: a long step takes them past the lowest point
    pushing = replace(plain, negative_memories=1.0, step_size=30.0)
    calm, wild = (
        pair.rises(pair.EnergyModel(c, rngs=nnx.Rngs(0)), PICTURES["validation"])
        for c in (plain, pushing)
    )
    assert calm["steps_observed"] == wild["steps_observed"] == 8 * 6
    assert calm["steps_up"] == calm["largest_relative_rise"] == 0
    assert 0 < wild["steps_up"] < 48 and wild["largest_relative_rise"] > 0.01
    # the first step of all is the one that is too long
    assert wild["raised_by_step"] == [wild["steps_up"], *[0] * 7]
    # sizes are told where they are learned
    learned = replace(plain, learn_steps=True, channel_steps=True, step_size=0.3)
    model = pair.EnergyModel(learned, rngs=nnx.Rngs(0))
    sizes = pair.rises(model, PICTURES["validation"])["alpha"]
    assert sizes == pytest.approx([0.3] * 8, rel=1e-6) and "alpha" not in calm


# --- many runs in one program


@pytest.mark.parametrize("name", ["et-maps-operations", "transformer-maps-operations"])
def test_a_lane_is_a_run_alone(pair, modules, tmp_path, monkeypatch, name):
    lanes = modules["image_lanes"]
    # decay and clipping that would be missed
    plan = plan_of(pair, steps=60, weight_decay=5.0)
    monkeypatch.setattr(pair, "OptimConfig", partial(OptimConfig, clip=0.05))
    jobs = [pair.Job(name, 60, *of) for of in ((0.003, 0), (0.001, 1), (1e30, 0))]
    found = lanes.train_together(plan, jobs, PICTURES, jnp.asarray(PICTURES["train"]))
    lanes.keep(plan, found, PICTURES, tmp_path / "out", tmp_path / "runs")
    rows = pair.read(tmp_path / "out", plan)
    # one that diverges leaves the others alone
    assert "not" not in rows[jobs[2]].pop("diverged")[:3] and len(rows) == 3
    for job in jobs[:2]:
        alone = pair.run(plan, job, PICTURES, tmp_path / str(job.seed), pair.Clock())
        row = rows[job]
        assert row.pop("lanes") == 3
        errors = np.load(tmp_path / "out" / f"{job.file(plan)}.npy")
        np.testing.assert_allclose(errors, alone.pop("test_errors"), rtol=2e-3)
        alone = json.loads(json.dumps(alone))
        assert row.keys() == alone.keys() and row["config"] == alone["config"]
        assert row["best_step"] == alone["best_step"]
        assert row["test_mse"] == pytest.approx(alone["test_mse"], rel=1e-3)
        for mine, other in zip(row["curve"], alone["curve"], strict=True):
            mine.pop("seconds"), other.pop("seconds")
            assert mine == pytest.approx(other, rel=1e-3)
        # the weights kept are those of the best step
        of = [tmp_path / "runs" / job.file(plan), tmp_path / str(job.seed)]
        saved = [read_meta(folder / "best.safetensors") for folder in of]
        assert saved[0] == saved[1]


def test_lanes_are_of_one_model_and_length(pair, modules):
    two = {"transformer": (4, 6), "transformer-plain": (4,)}
    jobs = [pair.Job(n, steps, 0.01, 0) for n in two for steps in two[n]]
    for different in (jobs[:2], jobs[::2]):
        with pytest.raises(ValueError, match="one model and length"):
            modules["image_lanes"].train_together(
                plan_of(pair), different, PICTURES, None
            )


@pytest.mark.parametrize(
    "options, message",
    [
        ("--rates 0.1", "folder of their own"),
        ("--rates 0.1 --out x --lr 0.1", "--rates: not together with"),
        ("--rates 0.1 --out x --trials", "--rates: not together with"),
        ("--budget 1", "unrecognized arguments: --budget"),
    ],
)
def test_lanes_refuse_what_they_would_ignore(modules, options, message, capsys):
    with pytest.raises(SystemExit):
        modules["image_lanes"].main(options.split())
    assert message in capsys.readouterr().err


def test_rates_of_lanes_surround_the_best(modules):
    lanes = modules["image_lanes"]
    grid = lanes.LEARNING_RATES
    assert lanes.more_rates({}, grid[9]) == [*grid[6:13]]
    # those already tried are not tried again
    assert lanes.more_rates({grid[9]: 1.0}, grid[9]) == [*grid[6:9], *grid[10:13]]
    tried = dict.fromkeys(grid[6:13], 2.0)
    first = lambda i: {grid[i]: 1.0} | {k: v for k, v in tried.items() if k != grid[i]}
    assert lanes.more_rates(first(8), grid[9]) == []
    assert lanes.more_rates(first(12), grid[9]) == [*grid[13:16]]
    assert lanes.more_rates(first(6), grid[9]) == [*grid[3:6]]
    # where the grid ends, fewer are tried, and the best may still be at their edge
    top = len(grid) - 1
    last = dict(zip(grid[top - 3 :], (1.0, 2.0, 3.0, 4.0)))
    assert lanes.more_rates(last, grid[top]) == [*grid[top - 6 : top - 3]]
    assert lanes.more_rates({grid[top]: 0.5} | last, grid[top]) == []


def test_lanes_as_a_command(pair, modules, tmp_path, monkeypatch):
    lanes = modules["image_lanes"]
    monkeypatch.setattr(pair, "pictures", lambda plan, folder: PICTURES)
    out, runs = tmp_path / "out", tmp_path / "runs"
    size = "--size tiny --data generated --batch-size 4 --validate-on 6 --longer 0"
    steps = "--trial-steps 2 --steps 4 --only transformer"
    folders = ["--out", str(out), "--runs", str(runs)]
    command = [*size.split(), *steps.split(), *folders, "--seeds", "0", "1"]
    lanes.main(command)
    plan = plan_of(pair, steps=4)
    found = pair.read(out, plan)
    trials = [job for job in found if job.steps == 2]
    full = [job for job in found if job.steps == 4]
    # the best of four at this width, beyond which the grid ends
    assert len(trials) == 4 and {job.seed for job in trials} == {0}
    best = next(iter(pair.rates(found, plan, "transformer")))
    assert {(job.lr, job.seed) for job in full} == {(best, 0), (best, 1)}
    assert {p.parent.name for p in runs.glob("*/best.safetensors")} == {
        job.file(plan) for job in full
    }
    # all seeds at each of the rates, without trials
    other = tmp_path / "rates"
    lanes.main([*command, "--out", str(other), "--rates", "0.01", "0.02"])
    made = {(job.steps, job.lr, job.seed) for job in pair.read(other, plan)}
    assert made == {(4, rate, seed) for rate in (0.01, 0.02) for seed in (0, 1)}
    # nothing is made again, and a summary makes nothing
    monkeypatch.setattr(lanes, "train_together", None)
    lanes.main(command)
    lanes.main([*command[:-1], "7", "--summary"])


# --- kept downhill


def test_training_goes_on_downhill(pair, modules, tmp_path, monkeypatch, capsys):
    downhill = modules["image_downhill"]
    monkeypatch.setattr(pair, "pictures", lambda plan, folder: PICTURES)
    runs, out = tmp_path / "runs", tmp_path / "out"
    plan = plan_of(pair, steps=40, longer=0)
    job = pair.Job(downhill.NAME, 40, 0.045, 0)
    before = pair.run(plan, job, PICTURES, runs / job.file(plan), pair.Clock())
    # as if all weights but the second went uphill somewhere; then the count at the end
    ups = iter([4, 0, 3, 3, 3, 3, 1])
    count = lambda *_: {"steps_up": next(ups), "steps_observed": 10}
    monkeypatch.setattr(pair, "rises", count)
    size = "--size tiny --data generated --batch-size 4 --steps 40 --seeds 0 --more 12"
    folders = ["--out", str(out), "--runs", str(runs)]
    downhill.main([*size.split(), *folders])
    (path,) = out.glob("*.json")
    row = json.loads(path.read_text())
    assert row["from"] == job.file(plan) and row["price"] == 1
    assert row["validation_before"] == pytest.approx(before["validation_mse"], rel=1e-4)
    model = json.loads(json.dumps(before["config"]["model"]))
    assert row["config"]["model"] == model
    assert row["best_step"] == 4 and row["steps_up"] == 1
    assert np.load(path.with_suffix(".npy")).mean() == pytest.approx(
        row["test_mse"], rel=1e-3
    )
    assert "1 of 10 steps raise E" in capsys.readouterr().out
    # nothing is made again
    monkeypatch.setattr(downhill, "run", None)
    downhill.main([*size.split(), *folders])


# --- packed pictures


def test_packed_pictures_are_the_stored_ones(modules, tmp_path):
    image = pytest.importorskip("PIL.Image")
    packed = modules["packed_pictures"]
    draw = np.random.default_rng(0)
    for split, count in dict(train=80, valid=4, test=3).items():
        (tmp_path / "set" / split).mkdir(parents=True)
        for i in range(count):
            noise = image.fromarray(draw.integers(0, 256, (64, 64, 3), np.uint8))
            noise.save(tmp_path / "set" / split / f"{i:02}.jpg")
    images = {
        split: load_images(str(tmp_path / "set"), split, size=64)
        for split in ("train", "validation", "test")
    }
    path = tmp_path / "packed.npz"
    counts = packed.pack(path, images, 1, held_out=4)
    assert counts == {"train": 80, "validation": 4, "test": 3}
    found = packed.unpack(path)
    for split in ("validation", "test"):
        np.testing.assert_array_equal(found[split], images[split][:])
    order = np.random.default_rng(0).permutation(80)
    np.testing.assert_array_equal(found["train"], images["train"][order])
    whole = path.read_bytes()
    packed.pack(path, images, 1, held_out=4)
    np.testing.assert_array_equal(packed.unpack(path)["train"], found["train"])
    assert len(path.read_bytes()) == len(whole)
    # less room: the first of the same order
    few = (2**17 + 100_000) / packed.MEGABYTE
    some = packed.pack(path, images, few, held_out=4)["train"]
    assert 0 < some < 80 and path.stat().st_size <= few * packed.MEGABYTE
    np.testing.assert_array_equal(packed.unpack(path)["train"], found["train"][:some])
    with pytest.raises(ValueError, match="megabytes: "):
        packed.pack(path, images, 0.06, held_out=4)


# --- what each term is worth


def test_variants_cost_the_same_and_are_energies(pair, modules):
    terms = modules["image_terms"]
    base = pair.Plan().base
    goal = pair.sized(base, "transformer").flops
    full = pair.sized(base, "et-metric-operations")
    assert terms.sized(base, terms.FULL) == full
    seen = set()
    for name in terms.VARIANTS:
        c = terms.sized(base, name)
        assert abs(c.flops / goal - 1) < 0.01, name
        assert c.num_memories >= c.dim, name
        # no two are the same but the one that differs in its loss
        assert c not in seen or name == "every step"
        seen.add(c)
        assert terms.file(name, 0)[:-7].replace("-", "").replace("=", "").isalnum()
    plain = terms.sized(base, "plain")
    memories = dict(num_memories=plain.num_memories, tied_start=True)
    assert plain == replace(base, **memories)


def test_a_variant_is_trained_and_scored(pair, modules, tmp_path):
    terms = modules["image_terms"]
    names = [terms.FULL, "every step", "self-attention"]
    plan = plan_of(pair, trial_steps=5)
    terms.work(plan, tmp_path, names, PICTURES)
    done = terms.read(tmp_path)
    assert len(done) == 9 and len({terms.score(row) for row in done.values()}) == 9
    for row in done.values():
        assert 0 < row["validation_mse"] < 10
        assert row["steps_observed"] == 2 * 6 and row["steps_up"] == 0
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    terms.work(plan, tmp_path, names, PICTURES)
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def test_the_loss_of_every_step_is_their_mean(pair, modules):
    terms = modules["image_terms"]
    plan = plan_of(pair)
    job = pair.Job("et-operations", 2, 0.01, 0)
    config = pair.configured(plan, job, PICTURES)
    model = terms.EnergyModel(config.model, rngs=nnx.Rngs(0))
    images, key = PICTURES["train"][:4], jax.random.key(0)
    mean = terms.loss_for(config, "every step")(model, images, key)[0]
    patches, occluded, masked = drawn_batch(config, images, key)
    each = [
        completion_loss(
            model.decode(model.descend(patches, masked, steps=t)[0]), patches, occluded
        )
        for t in range(1, config.model.steps + 1)
    ]
    assert each[0] != each[1]
    np.testing.assert_allclose(mean, np.mean(each), rtol=1e-5)
