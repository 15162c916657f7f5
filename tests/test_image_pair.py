"""The experiments on pictures that share image_pair.py: what they compare, and how their
runs are kept.
"""

import json
import shlex
from dataclasses import replace
from itertools import product

import image_pair as pair
import image_terms as terms
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import records
from flax import nnx

from et_nbdev.memory import SignedMemory
from et_nbdev.testing import assert_close, assert_gradient
from et_nbdev.vision.model import ImageConfig, load_model
from et_nbdev.vision.train import TrainConfig, completion_loss, drawn_batch

pytestmark = pytest.mark.usefixtures("compiled_once", "compile_quickly")
D, H, Y, K, N = 8, 2, 4, 32, 16
rng = np.random.default_rng(0)
PICTURES = {
    "train": rng.integers(0, 256, (20, 8, 8, 3), np.uint8),
    "validation": rng.integers(0, 256, (6, 8, 8, 3), np.uint8),
    "test": rng.integers(0, 256, (5, 8, 8, 3), np.uint8),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    "A size that trains in no time."
    sizes = dict(dim=D, num_heads=H, head_dim=Y, num_memories=K, steps=2)
    monkeypatch.setitem(pair.SIZES, "tiny", ImageConfig(**sizes, step_size=1.0))
    monkeypatch.setitem(pair.DATA, "generated", (8, 2))


def plan_of(**changes):
    sizes = dict(size="tiny", data="generated", batch_size=4, trial_steps=2, steps=6)
    return pair.Plan(**{**sizes, **dict(seeds=(0, 1)), **changes})


def shaken(tree, seed=0):
    "All parameters in double precision, moved off their start."
    draw = np.random.default_rng(seed).normal
    move = lambda p: jnp.asarray(np.asarray(p) + 0.1 * draw(size=p.shape))
    return jax.tree.map(move, tree)


# --- what is compared


def test_the_comparisons_are_fair():
    base = pair.Plan().base
    sizes = {name: pair.sized(base, name) for name in pair.NAMES}
    opponent = sizes["transformer"]
    for name, c in sizes.items():
        if name.endswith("operations"):
            goal = pair.operations(opponent, "transformer")
            assert abs(pair.operations(c, name) / goal - 1) < 0.01, name
        else:
            goal = pair.parameters(opponent, "transformer")
            assert abs(pair.parameters(c, name) / goal - 1) < 0.01, name
        assert (c.num_tokens, c.num_heads) == (64, base.num_heads)
        assert c.num_memories >= c.dim
        assert c.dim == base.dim or name == "et-paper-operations"
    assert sizes["et-paper-parameters"].steps == 12
    assert {c.steps for n, c in sizes.items() if "paper" not in n} == {base.steps}


def inputs(n):
    patches = jnp.asarray(rng.normal(size=(n, N, 12)), jnp.float32)
    return patches, jnp.asarray(rng.random((n, N)) < 0.5)


@pytest.mark.parametrize("name", "et-maps hyperset hyperset-true".split())
def test_operations_and_parameters_are_those_of_the_model(name):
    "What the library's recipes cost is in test_image_model.py."
    changes = dict(dim=64, num_heads=4, head_dim=16, num_memories=256)
    if name == "et-maps":  # so that their map is no small part
        changes = dict(dim=256, num_heads=2, head_dim=16, num_memories=64)
    c = replace(pair.Plan(size="tiny").base, **changes)
    c = pair.DESIGNS[name].config(c)
    model = pair.make(c, name)
    graphdef, params = nnx.split(model)
    patches = jnp.zeros((2, c.num_tokens, c.patch_dim), jnp.float32)
    masked = jnp.zeros((2, c.num_tokens), bool)
    forward = jax.jit(lambda params: nnx.merge(graphdef, params)(patches, masked))
    counted = forward.lower(params).compile().cost_analysis()["flops"] / 2
    assert 0.85 * counted < pair.operations(c, name) <= counted
    found = sum(p.size for p in jax.tree.leaves(params))
    assert pair.parameters(c, name) == found


@pytest.mark.parametrize("of", ["gated", "maps"])
def test_factors_start_where_the_transformer_does_and_are_trained(of):
    c = replace(plan_of().base, recipe="transformer")
    plain, gated = (pair.make(c, name) for name in ("transformer", f"transformer-{of}"))
    given = inputs(3)
    assert_close(gated(*given), plain(*given), rtol=1e-5)
    gated.metric.W[...] = jnp.ones_like(gated.metric.W[...])
    loss = lambda model: jnp.mean((model(*given) - given[0]) ** 2)
    slopes = nnx.jit(nnx.grad(loss))(gated)["metric"]
    assert all(np.any(leaf) for leaf in jax.tree.leaves(slopes))


# --- Hyper-SET


def test_the_true_gradient_is_one_and_the_published_step_is_none(x64):
    c = replace(pair.sized(plan_of().base, "hyperset-operations"), num_memories=K)
    published = shaken(pair.make(c, "hyperset").block)
    for gain in (published.head_gain, published.hidden_gain):
        gain[...] = jnp.ones_like(gain[...])
    true = shaken(pair.make(replace(c, recipe="hyperset-true"), "hyperset-true").block)
    true.attention, true.memory = published.attention, published.memory
    g = jnp.asarray(rng.normal(size=(2, 5, D)))
    energies, update = true.energies_and_update(g)
    assert_gradient(true.energy, g, -update)
    steps = dict(attention=published.attend(g), memory=-published.recall(g))
    for name, step in steps.items():
        term = true.terms[name]
        assert_gradient(term.energy, g, -term.update(g))
        with pytest.raises(AssertionError, match="largest error"):
            assert_gradient(term.energy, g, step)
        true_step = -term.update(g)
        size = jnp.linalg.norm(step) * jnp.linalg.norm(true_step)
        # downhill, but another way
        assert 0 < jnp.sum(step * true_step) / size < 0.95


# --- runs


def test_a_full_run_is_scored_on_the_test_split_when_it_ends(tmp_path):
    plan = plan_of(seeds=(0,), lr=0.01, steps=3, weight_decay=0.0)
    out, runs = tmp_path / "out", tmp_path / "runs"
    names = ["et-operations", "transformer"]
    pair.work(plan, names, out, runs, PICTURES)
    stems = {f"generated-tiny-4-decay-0-{n}-3-0.01-0" for n in names}
    files = {p.name for p in out.iterdir()}
    assert files == {f"{stem}.{end}" for stem in stems for end in ("json", "npy")}
    for job in (pair.Job(name, 3, 0.01, 0) for name in names):
        row = json.loads((out / f"{job.file(plan)}.json").read_text())
        errors = np.load(out / f"{job.file(plan)}.npy")
        assert errors.shape == (5,) and row["config"]["optim"]["weight_decay"] == 0
        assert row["test_mse"] == pytest.approx(errors.mean(), rel=1e-3)
        # of the weights that were best on validation
        model = load_model(runs / job.file(plan) / "best.safetensors")
        score = pair.score_of(model, TrainConfig(model.config), PICTURES["test"])
        np.testing.assert_allclose(errors, score, rtol=1e-3)
        if job.name == "transformer":
            assert "steps_up" not in row
        else:
            assert row["steps_observed"] == model.config.steps * 6
            assert row["steps_up"] == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    pair.work(plan, names, out, runs, PICTURES)  # nothing is made again
    assert before == {path: path.read_bytes() for path in out.iterdir()}


def test_the_recorded_commands_make_the_kept_runs(monkeypatch):
    made, folders = set(), ("image-pair", "image-rates")

    def work(plan, names, out, *_):
        for name, seed in product(names, plan.seeds):
            run = f"{out.name}/{pair.Job(name, plan.steps, plan.lr, seed).file(plan)}"
            kept, c = records.one(run)["config"]["model"], pair.sized(plan.base, name)
            for size in ("dim", "num_memories", "steps", "step_size"):
                assert kept[size] == getattr(c, size), (run, size)
            made.add(run)

    monkeypatch.setattr(pair, "work", work)
    monkeypatch.setattr(pair, "pictures", lambda *_: None)
    for line in records.commands(*folders).replace("\\\n", "").splitlines():
        pair.main(shlex.split(line)[2:])
    kept = {path for f in folders for path in (records.RESULTS / f).glob("*.json")}
    kept = {f"{path.parent.name}/{path.stem}" for path in kept}
    assert made == {run for run in kept if "-450-" not in run or "rates" in run}


def test_steps_that_raise_the_energy_are_counted():
    tokens = dict(image_size=8, patch_size=2, dim=16, num_heads=2, head_dim=8)
    plain = ImageConfig(**tokens, num_memories=32, steps=8)
    # all memories push tokens away: a long step takes them past the lowest point
    made = lambda c: pair.EnergyModel(c, rngs=nnx.Rngs(0))
    still, pushing = made(plain), made(replace(plain, step_size=30.0))
    memory = SignedMemory(16, 32, negative=1.0, rngs=nnx.Rngs(0))
    memory.xi[...] = pushing.block.memory.xi[...]
    pushing.block.memory = memory
    calm, wild = (pair.rises(net, PICTURES["validation"]) for net in (still, pushing))
    assert calm["steps_observed"] == wild["steps_observed"] == 8 * 6
    assert calm["steps_up"] == calm["largest_relative_rise"] == 0
    assert 0 < wild["steps_up"] < 48 and wild["largest_relative_rise"] > 0.01
    # the first step of all is the one that is too long
    assert wild["raised_by_step"] == [wild["steps_up"], *[0] * 7]


# --- what each term is worth


def test_variants_cost_the_same_and_are_energies():
    base = pair.Plan().base
    goal = pair.operations(pair.sized(base, "transformer"), "transformer")
    full = pair.sized(base, "et-metric-operations")
    own = replace(terms.sized(base, terms.FULL), recipe=full.recipe)
    assert own == full
    made = [m(c, n, 0) for m, c, n in (
        (pair.make, full, "et-metric"), (terms.model_of, full, terms.FULL)
    )]  # fmt: skip
    a, b = (nnx.to_pure_dict(nnx.state(net, nnx.Param)) for net in made)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    for name in terms.VARIANTS:
        c = terms.sized(base, name)
        assert abs(terms.operations_of(c, name) / goal - 1) < 0.01, name
        assert c.num_memories >= c.dim, name
        assert terms.file(name, 0)[:-7].replace("-", "").replace("=", "").isalnum()
    # nothing added, it is the model of the paper
    c = replace(plan_of().base, recipe="waves")
    nets = terms.model_of(c, "plain", 0), pair.EnergyModel(c, rngs=nnx.Rngs(0))
    patches = jnp.asarray(rng.normal(size=(3, N, 12)), jnp.float32)
    assert_close(*(net(patches, jnp.zeros((3, N), bool)) for net in nets))


def test_the_loss_of_every_step_is_their_mean():
    plan = plan_of()
    job = pair.Job("et-operations", 2, 0.01, 0)
    config = pair.configured(plan, job, PICTURES)
    model = terms.EnergyModel(config.model, rngs=nnx.Rngs(0))
    images, key = PICTURES["train"][:4], jax.random.key(0)
    mean = terms.training_loss(config, terms.every_step)(model, images, key)[0]
    patches, occluded, masked = drawn_batch(config, images, key)
    each = [
        completion_loss(
            model.decode(model.descend(patches, masked, steps=t)[0]), patches, occluded
        )
        for t in range(1, config.model.steps + 1)
    ]
    assert each[0] != each[1]
    np.testing.assert_allclose(mean, np.mean(each), rtol=1e-5)
