"""The script behind notebook 35: its lines come from files of the published formats, go
on where they stopped, and run nothing twice.
"""

import json
from functools import partial
from pathlib import Path

import anomaly_results as script
import numpy as np
import pytest
from test_graph_data import write_mat

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("compiled_once", "compile_quickly")
FEW = "--ratios 0.4 --trials 2 --seeds 2 --epochs 3".split()


@pytest.fixture(autouse=True)
def data(monkeypatch, tmp_path):
    monkeypatch.setenv("ET_DATA", str(tmp_path))
    for cached in ("graph_of", "features_of", "edges_of", "ahead"):
        getattr(script, cached).cache_clear()
    return tmp_path


def rows(folder):
    return {p.stem: json.loads(p.read_text()) for p in folder.iterdir()}


def test_a_row_of_yelpchi_from_its_file(data, monkeypatch):
    small = dict(dim=[8], num_memories=[8], num_heads=[2], head_dim=[4], steps=[1])
    monkeypatch.setitem(script.SPACES, "et", script.SPACES["et"] | small)
    write_mat(data / "YelpChi.mat", n=300)
    lines = ["et", "et-max", "bwgnn-2hop", "bwgnn-2hop-labels", "forest-2hop"]
    lines += ["et-no-attention", "bwgnn-2hop-labels-mean"]
    out = ["--out", str(data / "out")]
    script.main(["--data", "yelp", *FEW, *out, "--lines", "mlp"])
    script.main(["--data", "yelp", *FEW, *out, "--trials", "1", "--lines", *lines])
    found = rows(data / "out")
    assert set(found) == {f"yelp-0.4-{line}" for line in ("mlp", *lines)}
    found = {name.removeprefix("yelp-0.4-"): row for name, row in found.items()}
    for name, row in found.items():
        derived = name in ("et-no-attention", "bwgnn-2hop-labels-mean")
        assert len(row["trials"]) == (0 if derived else 1 + (name == "mlp"))
        assert [run["seed"] for run in row["runs"]] == [0, 1]
        for run in row["trials"] + row["runs"]:
            scores = [*run["validation"].values(), *run["test"].values()]
            assert all(0 <= score <= 1 for score in scores if score is not None)
        assert row["commit"] and row["config"] == row["runs"][0]["config"]
    by = partial(script.merit, 0.4)  # validation alone
    best = max(found["mlp"]["trials"], key=by)
    assert best["config"] == found["mlp"]["config"]
    part = found["et-no-attention"]["config"]
    assert part == found["et"]["config"] | {"num_heads": 0}
    one, mean = (found[f"bwgnn-2hop-labels{more}"] for more in ("", "-mean"))
    assert mean["config"] == one["config"]
    assert mean["runs"][0]["test"] != one["runs"][0]["test"]


def test_a_kept_run_is_made_again():
    (path,) = ROOT.glob("results/anomaly/digits-relations-0.4-mlp.json")
    kept = json.loads(path.read_text())
    of = kept["data"], kept["ratio"], kept["line"], kept["config"]
    again = script.evaluate(*of, 0, kept["epochs"], 1)["test"]["auroc"]
    assert again == pytest.approx(kept["runs"][0]["test"]["auroc"], abs=0.02)


@pytest.mark.parametrize("begun", [False, True])
def test_changes_wait_for_what_they_change(data, begun):
    "Another process may still be at it."
    if begun:
        row = dict(data="digits-knn", ratio=0.4, line="et", epochs=100, runs=[])
        file = data / "digits-knn-0.4-et.json"
        file.write_text(json.dumps(row | {"trials": [{}]}))
    given = "--data digits-knn --ratios 0.4 --lines et-no-memories --out".split()
    with pytest.raises(SystemExit, match="needs another line first .*-0.4-et.json"):
        script.main([*given, str(data)])


def test_no_label_is_asked_for_that_is_shown():
    """Training nodes alone show their labels. A model that repeats them gets every
    shown one right and knows nothing of the others; the loss is that of these, log 2.
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


def test_runs_of_a_setting_that_was_overtaken_are_not_kept(data, monkeypatch):
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


def test_published_splits_are_used_as_published(data, monkeypatch):
    "Their nodes train and test; average precision alone chooses setting and weights."
    rng, folder = np.random.default_rng(0), data / "graphs/anomaly"
    labels = np.arange(60) % 3 == 0
    features = labels[:, None] + rng.normal(size=(60, 2))
    senders, receivers = np.arange(60), np.roll(np.arange(60), 1)
    graph = dict(senders=senders, receivers=receivers, labels=labels.astype(np.int8))
    folder.mkdir(parents=True)
    np.savez(folder / "tolokers.npz", **graph, features=features.astype(np.float32))
    part = np.stack([np.repeat([0, 1, 2], [30, 15, 15])] * 2)
    part[1] = part[1][::-1]
    masks = {
        f"{name}_masks": part == k for k, name in enumerate(("train", "val", "test"))
    }
    np.savez(folder / "tolokers_splits.npz", **masks)
    for seed in (0, 1):
        found = script.parts_of("tolokers", "official", seed)
        assert [ids.tolist() for ids in found] == [
            np.flatnonzero(part[seed] == k).tolist() for k in range(3)
        ]
    train, by = script.train_classifier, []
    kept = lambda *of, **how: (by.append(how["chosen_by"]), train(*of, **how))[1]
    monkeypatch.setattr(script, "train_classifier", kept)
    given = "--data tolokers --ratios official --trials 2 --seeds 2 --epochs 10".split()
    script.main([*given, "--lines", "mlp", "--out", str(data / "out")])
    (row,) = rows(data / "out").values()
    best = max(row["trials"], key=lambda run: run["validation"]["auprc"])
    assert row["config"] == best["config"] and len(row["runs"]) == 2
    assert by == ["auprc"] * 4
    low = dict(macro_f1=1.0, auroc=1.0, auprc=0.25)
    assert script.merit("official", dict(validation=low)) == 0.25


def test_splits_that_look_ahead_know_nothing_later(data, monkeypatch):
    N, folder = 300, data / "graphs/anomaly"
    labels = np.where(np.arange(N) % 3, np.arange(N) % 2, -1)
    file = dict(features=np.eye(N, 4), labels=labels.astype(np.int8), time=np.arange(N))
    for kind in ("source", "target", "location", "type"):
        file |= {
            f"{kind}_senders": np.arange(N),
            f"{kind}_receivers": np.arange(N) // 2,
        }
    folder.mkdir(parents=True)
    np.savez(folder / "transactions.npz", **file)
    asked, last = [], 0
    ask = lambda name, *of: asked.append(script.graph_of(name)) or labels
    monkeypatch.setattr(script, "trained", ask)
    monkeypatch.setattr(script, "held_out", lambda *of: of)
    for seed in range(5):
        script.evaluate("transactions", "time", "mlp", dict(scale="rank"), seed, 1)
        known = np.concatenate(parts := script.ahead(seed)[1])
        assert (np.diff(known) > 0).all() and (labels[known] >= 0).all()
        assert last < parts.test[0] and known[-1] == asked[seed].num_nodes - 1
        last = known[-1]
