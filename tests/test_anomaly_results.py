"""The script behind notebook 35: its lines come from files of the published formats, go on
where they stopped, and run nothing twice.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from test_graph_data import write_mat

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("compiled_once", "compile_quickly")
FEW = "--ratios 0.4 --trials 2 --seeds 2 --epochs 3".split()


@pytest.fixture(scope="module")
def script():
    path = ROOT / "experiments/anomaly_results.py"
    spec = importlib.util.spec_from_file_location("anomaly_results", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def data(monkeypatch, tmp_path, script):
    monkeypatch.setenv("ET_DATA", str(tmp_path))
    for cached in (script.graph_of, script.features_of, script.edges_of):
        cached.cache_clear()
    return tmp_path


def rows(folder):
    return {p.stem: json.loads(p.read_text()) for p in folder.iterdir()}


def record(folder, line, **changes):
    "A kept file of a line of digits-knn."
    row = dict(data="digits-knn", ratio=0.4, line=line, epochs=100, trials=[], runs=[])
    path = folder / f"digits-knn-0.4-{line}.json"
    path.write_text(json.dumps(row | changes))


def test_a_row_of_yelpchi_from_its_file(data, script, monkeypatch):
    small = dict(dim=[8], num_memories=[8], num_heads=[2], head_dim=[4], steps=[1])
    monkeypatch.setitem(script.SPACES, "et", script.SPACES["et"] | small)
    write_mat(data / "YelpChi.mat", n=300)
    lines = ["et", "et-max", "bwgnn-2hop", "forest-2hop", "et-no-attention"]
    out = ["--out", str(data / "out")]
    script.main(["--data", "yelp", *FEW, *out, "--lines", "mlp"])
    script.main(["--data", "yelp", *FEW, *out, "--trials", "1", "--lines", *lines])
    found = rows(data / "out")
    assert set(found) == {f"yelp-0.4-{line}" for line in ("mlp", *lines)}
    for name, row in found.items():
        trials = {"yelp-0.4-mlp": 2, "yelp-0.4-et-no-attention": 0}.get(name, 1)
        assert len(row["trials"]) == trials
        assert [run["seed"] for run in row["runs"]] == [0, 1]
        for run in row["trials"] + row["runs"]:
            scores = [*run["validation"].values(), *run["test"].values()]
            assert all(0 <= score <= 1 for score in scores if score is not None)
        assert row["commit"] and row["config"] == row["runs"][0]["config"]
    best = max(found["yelp-0.4-mlp"]["trials"], key=script.merit)  # by validation alone
    assert best["config"] == found["yelp-0.4-mlp"]["config"]
    whole, part = (found[f"yelp-0.4-{n}"]["config"] for n in ("et", "et-no-attention"))
    assert part == whole | {"num_heads": 0}


def test_a_kept_run_is_made_again(script):
    (path,) = ROOT.glob("results/anomaly/digits-relations-0.4-mlp.json")
    kept = json.loads(path.read_text())
    of = kept["data"], kept["ratio"], kept["line"], kept["config"]
    run = script.evaluate(*of, 0, kept["epochs"], 1)
    assert run["test"]["auroc"] == pytest.approx(
        kept["runs"][0]["test"]["auroc"], abs=0.02
    )


def test_edges_of_a_second_kind_link_nodes_with_similar_features(script):
    plain, graph = map(script.graph_of, ("digits-knn", "digits-knn-alike"))
    assert {*graph.relations} == {"own", "alike"}
    assert np.array_equal(graph.features, plain.features)
    edges = lambda ends: set(zip(*map(np.ndarray.tolist, ends)))
    assert edges(graph.relations["own"]) == edges(plain.edges)
    x = plain.features - plain.features.mean(0)
    x = x / np.where(x.std(0) > 0, x.std(0), 1)
    far = ((x[:, None] - x[None]) ** 2).sum(-1)
    np.fill_diagonal(far, np.inf)  # no node is its own neighbor
    alike = edges(graph.relations["alike"])
    for b in range(0, graph.num_nodes, 97):
        mine = {c for c, to in alike if to == b}
        nearest = np.argsort(far[b])[:8]
        chose = {c for c in mine if far[b, c] <= np.sort(far[c])[7] + 1e-6}
        assert set(nearest) <= mine and mine <= set(nearest) | chose


def test_a_stopped_run_goes_on_and_ends_with_the_same_numbers(
    data, script, monkeypatch
):
    line = ["--data", "digits-relations", *FEW, "--lines", "mlp", "--out"]
    script.main([*line, str(data / "whole")])
    evaluate, calls = script.evaluate, []

    def stop_after_three(*args):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(args)
        return evaluate(*args)

    monkeypatch.setattr(script, "evaluate", stop_after_three)
    with pytest.raises(SystemExit, match="stopped"):
        script.main([*line, str(data / "parts")])
    (half,) = rows(data / "parts").values()
    assert len(half["trials"]) == 2 and len(half["runs"]) == 1
    monkeypatch.setattr(script, "evaluate", evaluate)
    script.main([*line, str(data / "parts")])
    (whole,), (parts,) = (rows(data / kind).values() for kind in ("whole", "parts"))
    timeless = lambda run: {k: v for k, v in run.items() if k != "seconds"}
    for part in ("trials", "runs"):
        assert [*map(timeless, whole[part])] == [*map(timeless, parts[part])]
    monkeypatch.setattr(script, "evaluate", None)  # what is complete is not run again
    script.main([*line, str(data / "parts")])


@pytest.mark.parametrize("trials", [None, 0, 7])
def test_changes_wait_for_what_they_change(data, script, trials):
    "Another process may still be at it."
    if trials is not None:
        record(data, "et", trials=[{}] * trials)
    wrong = ["--search"] if trials else ["--lines", "et-no-memories"]
    given = ["--data", "digits-knn", "--ratios", "0.4", "--out", str(data), *wrong]
    with pytest.raises(SystemExit, match="needs another line first .*-0.4-et.json"):
        script.main(given)


def test_another_number_of_epochs_is_not_mixed_in(data, script):
    record(data, "mlp")
    given = ["--data", "digits-knn", *FEW, "--lines", "mlp", "--out", str(data)]
    with pytest.raises(SystemExit, match="--epochs: .* was made with 100, got 3"):
        script.main(given)


def test_no_label_is_asked_for_that_is_shown(script):
    """Training nodes alone show their labels. A model that repeats them gets every shown
    one right and knows nothing of the others; the loss is that of these, log 2.
    """
    few = script.with_labels(np.ones((4, 3)), np.array([0, 1, 1, 0]), np.array([0, 2]))
    assert few[:, 3:].tolist() == [[1, 0], [0, 0], [0, 1], [0, 0]]
    rng = np.random.default_rng(0)
    labels, train = rng.integers(0, 2, 50), np.arange(0, 50, 2)
    features = script.with_labels(np.ones((50, 3), np.float32), labels, train)
    batch = script.Batch(*map(script.jnp.asarray, (features, 0, train, labels[train])))
    repeats = lambda features, edges, rngs: 100 * features[:, -2:]
    for seed in range(5):
        loss = script.completion_loss(repeats, batch, script.jax.random.key(seed))[0]
        assert np.isclose(loss, np.log(2))


def test_a_mean_over_starts_has_the_setting_of_its_line(data, script):
    few = ["--data", "digits-knn", *FEW, "--out", str(data), "--trials", "1"]
    lines = ["bwgnn-2hop-labels", "bwgnn-2hop-labels-mean"]
    script.main([*few, "--lines", *lines])
    one, mean = (rows(data)[f"digits-knn-0.4-{line}"] for line in lines)
    assert mean["config"] == one["config"] and not mean["trials"]
    scores = lambda row: [run["test"] for run in row["runs"]]
    assert scores(one) != scores(mean) and len(mean["runs"]) == 2


def test_more_trials_begin_with_the_same_ones(script):
    for space in script.SPACES.values():
        few = script.draws(space, script.BATCH)
        many = script.draws(space, 3 * script.BATCH)
        assert many[: script.BATCH] == few
        assert len({json.dumps(point) for point in many}) == 3 * script.BATCH
    assert len(script.draws(script.SPACES["forest"], 1000)) == 36


def test_runs_of_a_setting_that_was_overtaken_are_not_kept(data, script, monkeypatch):
    "More trials may find a better setting: its runs take the place of the old one's."
    score = lambda config: {"macro_f1": config["lr"], "auroc": config["lr"]}
    made = lambda *of: {"seed": of[4], "validation": score(of[3]), "test": score(of[3])}
    monkeypatch.setattr(script, "evaluate", lambda *of: {**made(*of), "seconds": 0.0})
    given = "--data digits-knn --ratios 0.4 --lines mlp --seeds 2".split()
    for trials in (1, 16):
        script.main([*given, "--out", str(data), "--trials", str(trials)])
        (row,) = rows(data).values()
        best = max(run["config"]["lr"] for run in row["trials"])
        assert len(row["trials"]) == trials and row["config"]["lr"] == best
        assert [run["config"]["lr"] for run in row["runs"]] == [best] * 2


def test_changes_that_lost_are_built_here(script):
    "Positions start at nothing and are learned; β starts elsewhere, or is fixed."
    from et_nbdev.graph.anomaly import AnomalyEnergyTransformer

    graph = script.graph_of("digits-knn")
    y, edges = script.scaled(graph), AnomalyEnergyTransformer.prepare(graph)
    sizes = dict(dim=8, num_heads=2, head_dim=4, num_memories=8, hidden=8)
    build = lambda **more: script.transformer(y, sizes | more, len(y), 1, 0)
    plain, placed = build(), build(positions=True)
    assert np.array_equal(placed(y, edges), plain(y, edges))
    slope = script.nnx.grad(lambda model: model(y, edges).sum())(placed)
    assert np.abs(slope.positions[...]).max() > 0
    beta = lambda **more: np.asarray(build(**more).blocks[0].attention.beta)
    np.testing.assert_allclose(
        (beta(), beta(beta=1.0)), ([0.5] * 2, [1] * 2), rtol=1e-6
    )
    fixed = build(learn_beta=False).blocks[0].attention
    assert fixed.beta[0] == 0.5 and not hasattr(fixed, "log_beta")
