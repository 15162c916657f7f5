"""What the runs of results/ printed, as tables in nbs/records/. The lessons summarize it,
and read the same files by the functions at the top.

    python scripts/records.py        writes the pages; a test compares them with results/
"""

import json
from pathlib import Path

import numpy as np

from et_nbdev.testing import half_interval

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"

# --- what lessons and pages share ---


def read(folder, pattern="*.json"):
    "The JSON files of a folder of results."
    return [json.loads(p.read_text()) for p in sorted((RESULTS / folder).glob(pattern))]


def one(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def grouped(rows, *names):
    "{value, or tuple of values, of a row's entries: {its seed or fold: row}}"
    found = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        by = found.setdefault(key if len(names) > 1 else key[0], {})
        by[row["seed"] if "seed" in row else row["fold"]] = row
    return found


def look(row, path):
    "An entry, of an entry, …: look(row, 'test.auroc')."
    for name in path.split("."):
        row = row.get(name) if row else None
    return row


def spread(values, digits=".4f"):
    "Mean ± standard deviation, where there are several."
    more = f" ± {np.std(values, ddof=1):{digits}}" if len(values) > 1 else ""
    return f"{np.mean(values):{digits}}{more}"


class Gap:
    """The mean of paired differences, an entry of the rows a minus that of the rows b
    with the same seed, and half its 95 % interval; `overlap` is n_test / n_train where
    splits share data (Nadeau and Bengio).
    """

    def __init__(self, a, b, score="test_mse", overlap=0.0):
        both = sorted(a.keys() & b.keys())
        self.each = np.array([look(a[s], score) - look(b[s], score) for s in both])
        self.mean, self.n = self.each.mean(), len(both)
        self.half = half_interval(self.each, overlap)

    @property
    def word(self):
        decided = abs(self.mean) > self.half
        return ("higher" if self.mean > 0 else "lower") if decided else "undecided"

    def told(self, digits=".4f"):
        half = f" ± {self.half:{digits}}" if self.n > 1 else " (one run)"
        return f"{self.mean:+{digits}}{half}".replace("-", "−")


def table(head, rows):
    "Markdown."
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def forest(ax, gaps, colors=None, label="", unit=1):
    "A row for each difference: its mean and interval; hollow, without one, if single."
    for y, gap in enumerate(gaps.values()):
        color = colors[y] if colors else "#0072B2"
        bar = dict(xerr=unit * gap.half, mfc=color) if gap.n > 1 else dict(mfc="none")
        ax.errorbar(unit * gap.mean, y, fmt="o", ms=6, color=color, **bar)
    ax.axvline(0, color="0.5", lw=1, zorder=0)
    ax.set_yticks(range(len(gaps)), gaps, fontsize=10)
    ax.set_ylim(len(gaps) - 0.5, -0.5)
    ax.set_xlabel(label, fontsize=10)
    ax.grid(axis="x", alpha=0.3)


def said(values, digits):
    "A cell of a table: what one or several rows have there; with | that of each."
    values = [v for v in values if v is not None]
    if not values:
        return "–"
    if digits == "|" or isinstance(values[0], (list, tuple)):
        each = values if digits == "|" else values[0]
        return " ".join(f"{v:{digits.strip('|')}}" for v in each)
    if len({str(v) for v in values}) == 1 and (
        not digits or values[0] == int(values[0])
    ):
        return f"{values[0]:{digits}}" if digits else str(values[0]).strip("{}")
    if isinstance(values[0], (str, bool, dict)):
        return " and ".join(dict.fromkeys(map(str, values)))
    return spread(values, digits or "g")


def dump(
    groups, columns, head="", minus=None, score="test_mse", overlap=0.0, order=None
):
    """A table: a row for every group, {label: {seed: row}}, or for every row of a list.
    `columns` are entries with their formats, 'validation_mse:.4f seed'. `minus`
    {head: label, or a function of the label}: differences of `score` from that group.
    """
    if not isinstance(groups, dict):
        groups = {("",) + (k,): {0: row} for k, row in enumerate(groups)}
    columns = [(path, f) for path, _, f in (c.partition(":") for c in columns.split())]
    digits = dict(columns).get(score, ".4f")
    rows = []
    for label, by in groups.items():
        own = label if isinstance(label, tuple) else (label,)
        row = [] if own[0] == "" else [*own]
        row += [said([look(r, p) for r in by.values()], f) for p, f in columns]
        for base in (minus or {}).values():
            base = groups.get(base(label) if callable(base) else base)
            alike = base is None or base is by or not base.keys() & by.keys()
            row.append("–" if alike else Gap(by, base, score, overlap).told(digits))
        rows.append(
            (np.mean([look(r, order) for r in by.values()]) if order else 0, row)
        )
    names = head.split(", ") if head else []
    short = lambda path: path.replace("config.model.", "").replace(".", " ")
    names += [short(path).replace("_", " ") for path, _ in columns]
    rows = [row for _, row in sorted(rows, key=lambda row: row[0])]
    return table([*names, *(minus or {})], rows) + "\n"


# --- completing pictures ---

MODELS = {
    "et-operations": "ET, a gate",
    "et-small-operations": "ET, a gate, σ = 1/√K",
    "et-small-parameters": "ET, a gate, σ = 1/√K, equal parameters",
    "et-paper-operations": "ET, the paper's setting",
    "et-metric-operations": "ET, one W",
    "et-metric-operations-free": "ET, one W, no decay",
    "et-metric-parameters": "ET, one W, equal parameters",
    "et-gelu-operations": "ET, one W, GELU",
    "et-maps-operations": "ET, W per step",
    "et-maps-operations-free": "ET, W per step, no decay",
    "transformer": "transformer",
    "transformer-free": "transformer, no decay",
    "transformer-plain": "transformer without relative positions",
    "transformer-gated-operations": "transformer, factors",
    "transformer-maps-operations": "transformer, factors, W per step",
    "hyperset-operations": "Hyper-SET, as published",
    "hyperset-true-operations": "Hyper-SET's energy, its gradient",
}
BASES = "transformer", "transformer-gated-operations", "et-metric-operations"


def picture_runs(folder="image-pair", data="tiny-imagenet"):
    "Runs; names that end in -free are without weight decay."
    rows = read(folder, f"{data}*.json")
    for row in rows:
        row["name"] += "-free" * row["kind"].endswith("decay-0")
        row["model"], row["MFLOP"] = MODELS[row["name"]], row["operations"] / 1e6
    order = lambda r: (r["steps"], list(MODELS).index(r["name"]), r["lr"], r["seed"])
    return sorted(rows, key=order)


def full_runs():
    "{(optimizer steps, name): {seed: run}} of the runs that are compared."
    return grouped([r for r in picture_runs() if r["steps"] > 450], "steps", "name")


def ladder():
    "{(rung, start of the positions): {seed: run}}"
    rows = read("image-ladder")
    for row in rows:
        row["rung"], row["start"] = row["name"].rsplit("-", 1)
    return grouped(rows, "rung", "start")


def points(run):
    "{pictures seen: validation error}"
    return {p["pictures"]: p["validation"] for p in run["curve"] if "validation" in p}


def commands(*folders):
    "The commands that make the full runs of some folders."
    lines = []
    for folder in folders:
        key = "name", "steps", "lr", "kind", "backend"
        groups = grouped(read(folder), *key)
        for (name, steps, lr, kind, backend), by in groups.items():
            if (steps, folder) == (450, "image-pair"):
                continue  # `--trials`
            line = f"python experiments/image_pair.py --steps {steps} --lr {lr:g}"
            line += " --lanes" * (backend == "gpu")
            line += " --data cifar10" * kind.startswith("cifar")
            line += " --weight-decay 0" * kind.endswith("decay-0")
            line += f" --out results/{folder}" * (folder != "image-pair")
            line += " --trial-steps 225" * (steps == 450)
            lines.append(
                f"{line} \\\n    --only {name} --seeds {' '.join(map(str, by))}"
            )
    return "\n".join(sorted(lines))


def pictures():
    yield """Every run behind [what an exact energy costs](../26_parity.ipynb). Errors are on
hidden patches, 1 = variance of the pixels. ± is a standard deviation over seeds, and in
differences (seed by seed) half their 95 % interval. *One W*, *W per step*: a step size
for every channel; *factors*: the same in the transformer. *Missing*: a third seed of one W
without decay, ten passes of transformers without decay, 40 passes, equal parameters, widths
384 and 768; the ladder's ReLU, starts, fewer parameters and rate, one by one.

## From a transformer to the energy, one change at a time

450 steps of 64 pictures at the rate 0.008. Rung 0 is the transformer.
"""
    found = ladder()
    names = sorted({rung for rung, _ in found})
    above = lambda k: (names[names.index(k[0]) - 1], k[1]) if k[0] != names[0] else None
    minus = {
        "minus the rung before": above,
        "minus rung 0": lambda k: (names[0], k[1]),
        "minus no positions": lambda k: (k[0], "none"),
        "minus free table": lambda k: (k[0], "zero"),
    }
    columns = "parameters:, validation_mse:.4f"
    yield dump(found, columns, "rung, positions", minus, "validation_mse")
    yield """## The whole model with one change

450 steps at the rate 0.045, equal operations; steps that raise E on 100 pictures.
"""
    columns = "parameters:, config.model.num_memories validation_mse:.4f"
    columns += " steps_up:| steps_observed"
    variants, minus = grouped(read("image-terms"), "name"), {"minus full": "full"}
    error = "validation_mse"
    yield dump(variants, columns, "variant", minus, error, order=error)
    yield "## Full runs\n"
    minus = {
        f"minus {MODELS[name]}": lambda k, name=name: (k[0], name)
        for name in (*BASES, "et-metric-operations-free", "hyperset-operations")
    }
    columns = "model parameters:, MFLOP:.0f validation_mse:.4f test_mse:.4f"
    yield dump(full_runs(), columns, "steps, name", minus)
    yield """## Every run

Trials have 450 steps. *Up*: of the six steps on each of 100 validation pictures, those
that raise E by more than a millionth; pictures by step, and the learned α.
"""
    rows = picture_runs() + picture_runs("image-rates") + picture_runs(data="cifar10")
    columns = "kind name steps:, lr seed validation_mse:.4f test_mse:.4f steps_up"
    yield dump(rows, f"{columns} largest_relative_rise:.1% raised_by_step alpha:.2g")
    yield "## Ten passes: validation error by thousands of pictures, means over seeds\n"
    curves = {n: [points(r) for r in b.values()] for (s, n), b in full_runs().items()
              if s == 10_938}  # fmt: skip
    at = list(next(iter(curves.values()))[0])
    mean = lambda name, seen: f"{np.mean([run[seen] for run in curves[name]]):.4f}"
    rows = [(seen // 1000, *(mean(name, seen) for name in curves)) for seen in at]
    yield table(("", *(MODELS[name] for name in curves)), rows)
    yield "\n## With a price on rises, 900 steps more; 1,000 test pictures\n"
    columns = (
        "price seed validation_before:.4f validation_mse:.4f test_mse:.4f steps_up:,"
    )
    columns += " steps_observed:, largest_relative_rise:.1% raised_by_step"
    yield dump(read("image-downhill"), columns)
    yield """## Memories that act, and what weight decay leaves

*Short*: less than 0.01 long. *Decayed*: the sum $\\sum\\eta\\lambda$ of rate times decay;
of a weight without a gradient $e^{-\\sum\\eta\\lambda}$ stays.
"""
    columns = "run memories pull pull_over_a_hundredth median_length:.3f short"
    columns += " thresholds_of_short:.2f decayed:.1f"
    yield dump(one("image-memories"), columns)
    cost = one("benchmarks/pair")
    yield f"## Milliseconds of a step of {cost['batch_size']} pictures, two cores\n"
    ms = lambda name: np.array([cost["seconds"][name], *cost["spread"][name]]) * 1e3
    told = lambda name: "{:.0f} (middle 80 %: {:.0f} to {:.0f})".format(*ms(name))
    each = cost["over_transformer"].items()
    rows = [(MODELS[name], told(name), f"{x:.2f}") for name, x in each]
    yield table(("model", "median", "beside the transformer's"), rows)
    yield f"""
## Commands

`--lanes` ran on a GPU with `JAX_DEFAULT_MATMUL_PRECISION=highest`; `--trials`: short runs.

```sh
python experiments/image_ladder.py
python experiments/image_terms.py
{commands("image-pair", "image-rates")}
python experiments/image_downhill.py
python experiments/image_downhill.py --price 0 --seeds 0
python experiments/image_memories.py
```"""


# --- small runs on pictures ---


def parts():
    "{setting of the paper's model: {seed: run}}"
    rows = read("image-ablations")
    for row in rows:
        row["error"], row["scatter"] = np.mean(row["mse"]), np.std(row["mse"], ddof=1)
        row["by_step"] = [f"{t}: {v:.3f}" for t, v in (row["by_time"] or {}).items()]
        row["alike"] = [
            f"{d}: {c:+.2f}"
            for d, c in (alike(row) if row["positions"] else {}).items()
        ]
        row["TFLOP"] = row["training_flops"] / 1e12
    return grouped(rows, "name")


def alike(run, distances=(1, 2, 4, 8)):
    "The mean cosine of a run's positions, by their distance in patches."
    p = np.array(run["positions"])
    p /= np.linalg.norm(p, axis=1, keepdims=True)
    at = np.stack(np.divmod(np.arange(len(p)), int(len(p) ** 0.5)), 1)
    apart = np.abs(at[:, None] - at).sum(-1)
    return {d: (p @ p.T)[apart == d].mean() for d in distances}


def rest_runs():
    "{model whose descent runs on: {seed: run}}"
    rows = read("image-dynamics", "*-[0-9].json")
    for row in rows:
        row["best"], row["after_300"] = min(row["mse"]), row["mse"][-1]
        row["after_6"] = row["mse"][row["steps"].index(6)]
        fill = row["settled"]["below_best_fill"]
        row["below_fill"] = fill["mse"] / fill["standard_error"]
    return grouped(rows, "name")


def small_pictures():
    yield """The runs on CIFAR-10 (re-encoded in JPEG) and short ones on Tiny ImageNet behind
[inside a trained model](../24_image_results.ipynb) and [best at rest](../27_image_dynamics.ipynb).
The short ones on Tiny ImageNet and the long ones of 2026-11-21 were made outside of git.

## The paper's model, changed

700 steps of 64 pictures, 1,000 test pictures with ten occlusions each. *Scatter*: a
standard deviation over occlusions. *By step*: error where the descent stops after so many
steps. *Alike*: cosine of positions, by distance in patches. Two cores, shared.
"""
    columns = "error:.4f scatter:.4f parameters:, TFLOP:.1f seconds:.0f by_step alike"
    minus = {f"minus {name}": name for name in ("ET-Full", "ET-NoHN")}
    yield dump(parts(), columns, "setting", minus, "error", order="error")
    yield "## Tiny ImageNet: the runs that chose start and rates, 450 steps, one seed\n"
    columns = (
        "block positions tied_start lr changes parameters:, mflop validation_mse:.4f"
    )
    tuned = one("tiny-imagenet-2026-11-21/tuning")["runs"]
    yield dump(tuned, columns, order="validation_mse")
    yield """## Where a descent runs on

1,500 steps of 64 pictures; 1,000 test pictures: error at its best in steps of α = 1,
after 6 and 300 of them, after fourteen growing ones, settled by backtracking; the share
that settled; evaluations; λ; paired standard errors below the best fill; error and share
at a tenth of the residual; steps that raise E.
"""
    columns = "best:.3f after_6:.3f after_300:.3f growing.mse:.3f settled.mse:.3f"
    columns += " settled.share:.0% settled.evaluations:.0f strength:.2f below_fill:.1f"
    columns += " deeper.mse:.3f deeper.share:.0% rises"
    minus = {"best minus that of T = 6": "T = 6"}
    yield dump(rest_runs(), columns, "model", minus, "best")
    fills = one("image-dynamics/fills")["fills"]
    yield dump(
        {k: {0: v} for k, v in fills.items()}, "mse:.3f standard_error:.3f", "fill"
    )
    yield """## Commands

```sh
python experiments/image_ablations.py
python experiments/image_dynamics.py
et_train_images --config tiny-imagenet-2026-11-21 --test_on 2000
et_train_images --config tiny-imagenet-2026-11-21 --model.block transformer \\
  --model.position_scale 1.0 --optim.lr 5e-3 \\
  --out runs/tiny-imagenet-transformer-2026-11-21 --test_on 2000
```"""


# --- odd nodes ---

LINES = {
    "mlp": "MLP",
    "forest": "random forest",
    "boosting": "boosted trees",
    "gcn": "GCN",
    "transformer": "graph transformer",
    "bwgnn": "BWGNN",
    "et": "Energy Transformer",
    "mlp-2hop": "MLP, 2 hops",
    "bwgnn-2hop": "BWGNN, 2 hops",
    "et-2hop": "ET, 2 hops",
    "forest-2hop": "random forest, 2 hops",
    "boosting-2hop": "boosted trees, 2 hops",
    "bwgnn-2hop-labels": "BWGNN, 2 hops, labels",
    "et-2hop-labels": "ET, 2 hops, labels",
}
METRICS = {"macro_f1": "macro-F1", "auroc": "AUROC", "auprc": "AUPRC"}
GRAPHS = [(data, share) for data in ("tolokers", "amazon-upu") for share in (0.01, 0.4)]


def lines():
    "{(graph, share of the labels, line): {split: run}}, each with its line's trials."
    found = {}
    for r in read("anomaly"):
        common = {"trials": r["trials"], "commit": r["commit"]}
        by = {run["seed"]: run | common for run in r["runs"]}
        found[r["data"], r["ratio"], r["line"]] = by
    return found


def overlap(share):
    "n_test / n_train: two thirds of what does not train are for the test."
    return 2 / 3 * (1 - share) / share


def margin(found, data, share, line, rival, metric="auroc"):
    a, b = (found[data, share, name] for name in (line, rival))
    return Gap(a, b, f"test.{metric}", overlap(share))


def best_of(trials):
    "Of macro-F1 and AUROC on validation nodes."
    merit = lambda r: r["validation"]["macro_f1"] + r["validation"]["auroc"]
    return max(trials, key=merit)


def odd_nodes():
    found = lines()
    final = [r for by in found.values() for r in by.values()]
    trials = [r for by in found.values() for r in by[0]["trials"]]
    hours = sum(r["seconds"] for r in final + trials) / 3600
    commits = ", ".join(sorted({r["commit"] for r in final}))
    yield f"""Every score behind [which detector finds odd nodes
best](../35_anomaly_results.ipynb): {len(found)} files, {len(trials)} trials and
{len(final)} final runs, {hours:.1f} hours of one core each. A + behind a commit marks
changed files beside it: {commits}.

Scores are on test nodes, mean ± standard deviation over splits. Differences are split by
split, ± half the 95 % interval of Nadeau and Bengio. *2hop*: the means of two hops as
features; *labels*: those of training nodes shown; *mean*: three starts; *no-*: without a
part, not tuned again; *et-max*, *et-concat*: a block for every kind of edge; *-alike*:
with edges between nodes of near features. Seconds of a training, with other work.
"""
    bases = (
        "et et-2hop boosting-2hop bwgnn et-2hop-labels bwgnn-2hop-labels mlp".split()
    )
    kinds = ("digits-relations", 0.01), ("digits-relations", 0.4)
    for data, share in (*GRAPHS, *kinds, ("amazon-upu-alike", 0.4)):
        own = {k[2]: by for k, by in found.items() if k[:2] == (data, share)}
        own = {k: by for k, by in own.items() if not k.startswith("et ")}
        yield f"## {data}, {share:.0%} of the labels\n"
        for by in own.values():
            for run in by.values():
                run["features"] = run["config"].get("scale", "")
        for m, name in METRICS.items():
            minus = {f"{name} minus {b}": b for b in bases if b in own}
            columns = f"test.{m}:.1%" + " features seconds:.1f" * (m == "auroc")
            yield dump(own, columns, "line", minus, f"test.{m}", overlap(share))
    yield """## Kinds of edges in equal settings

Gain over merged edges on the validation nodes of the first split, means over the eight
trials that both lines share, 40 % of the labels.
"""
    rows = []
    for data in ("digits-relations", "amazon-upu-alike"):
        for line in ("et-max", "et-concat"):
            a, b = (
                dict(enumerate(found[data, 0.4, n][0]["trials"][:8]))
                for n in (line, "et")
            )
            gaps = (Gap(a, b, f"validation.{m}").mean for m in METRICS)
            rows.append((data, line, *(f"{gap:+.1%}" for gap in gaps)))
    yield table(("graph", "line", *METRICS.values()), rows)
    yield "\n## Other terms, other steps: AUROC, 40 % of the labels\n"
    terms = grouped(read("graph-terms"), "data", "variant")
    minus = {"minus the tuned model": lambda k: (k[0], "as-found")}
    for part in ("validation", "test"):
        columns = f"{part}.auroc:.2% seconds:.0f"
        yield dump(terms, columns, "graph, variant", minus, f"{part}.auroc")
    yield """## One change at a time

The first split, 40 % of the labels; *as found* is the best of eight trials.
"""
    own = {(k[0], k[2][3:]): by for k, by in found.items() if k[2].startswith("et ")}
    minus = {"AUROC minus as found": lambda k: (k[0], "as found")}
    for part in ("validation", "test"):
        columns = f"{part}.auroc:.1%"
        yield dump(own, columns, "graph, change", minus, f"{part}.auroc")
    yield "## AUROC on the first split, of the best of eight trials and of sixteen\n"
    auroc = lambda trials: f"{best_of(trials)['test']['auroc']:.1%}"
    rows = [
        (data, f"{share:.0%}", line, auroc(tried[:8]), auroc(tried))
        for (data, share, line), by in found.items()
        for tried in [by[0]["trials"]]
        if line in LINES and len(tried) >= 16
    ]
    yield table(("graph", "labels", "line", "eight", "sixteen"), rows)
    tool = "experiments/anomaly_results.py"
    yield f"""
## Commands

```sh
python {tool} --data tolokers amazon-upu
python {tool} --search --ratios 0.4
python experiments/graph_terms.py
# if you can download the files:
python {tool} --data yelp amazon tfinance --ratios 0.01 0.4
et_train_anomaly --data tsocial --train_fraction 0.01 --sample.seeds 1024 \\
  --every 100 --splits 5
```"""


# --- whole graphs ---

SETS = "MUTAG PROTEINS ENZYMES NCI1 NCI109 Mutagenicity DD".split()
CLASSIFIERS = {
    "et": "ET",
    "gin": "GIN",
    "gin-returns": "GIN, same positions",
    "agnostic": "no edges",
    "et-eigenvectors": "ET, eigenvectors and CLS",
    "et-paper": "ET, the paper's setting",
}
ACCURACY = dict(score="test_accuracy", overlap=1 / 8)  # one fold tests, eight train


def folds():
    "{(set, model): {fold: record}}"
    rows = []
    for data in SETS:
        for model in CLASSIFIERS:
            for r in read(f"graph-classification/{data}/{model}", "fold-*.json"):
                winner, curve = r["candidates"][r["chosen"]], r["validation"]
                tried = [c["seconds"] / max(c["epochs"], 1) for c in r["candidates"]]
                at = [max(0, int(len(curve) * k) - 1) for k in (0.1, 0.25, 0.5, 1)]
                r |= dict(set=data, model=model, last_loss=r["loss"][-1], winner=winner)
                r |= dict(
                    learning=[curve[t] for t in at], epoch_seconds=np.median(tried)
                )
                rows.append(r)
    return grouped(rows, "set", "model")


def whole_graphs():
    found = folds()
    every = [r for by in found.values() for r in by.values()]
    hours = sum(r["seconds"] for r in every) / 3600
    yield f"""Every fold behind [the results on whole
graphs](../40_classification_results.ipynb): {len(every)} test folds,
{sum(len(r["candidates"]) for r in every):,} trainings, {hours:.1f} hours of a core. A test
checks that each file was made by the rules: its folds are those of `folds.json`, its
score is what its predictions make of the published labels, and its choice is the best
candidate on the validation fold. Commits: {", ".join(sorted({r["commit"] for r in every}))}.

## Accuracy

Means ± standard deviations over ten folds; differences on the same folds, ± half their
corrected 95 % interval. Last training loss, chosen epoch and parameters of the winner;
seconds of an epoch, with other work.
"""
    columns = "test_accuracy:.1% last_loss:.3f winner.epoch:.0f winner.epochs"
    columns += " winner.parameters:,.0f epoch_seconds:.2f"
    minus = {
        f"minus {n}": lambda k, m=m: (k[0], m) for m, n in [*CLASSIFIERS.items()][:4]
    }
    yield dump(found, columns, "set, model", minus, **ACCURACY)
    yield "## Learning\n\nValidation accuracy of the winner, mean over folds, at a tenth, a"
    yield "quarter, a half and all of the epochs.\n"
    mean = lambda by: np.mean([r["learning"] for r in by.values()], 0)
    rows = [(*key, *(f"{v:.1%}" for v in mean(by))) for key, by in found.items()]
    yield table(("set", "model", "10 %", "25 %", "50 %", "100 %"), rows)
    yield "\n## What was chosen\n\nOne list of candidates for all sets; only the number of"
    yield "epochs differs.\n"
    for model, name in CLASSIFIERS.items():
        own = [r for (_, m), by in found.items() if m == model for r in by.values()]
        tried = [c["model"] | c["fit"] for c in own[0]["settings"]["candidates"]]
        same = [k for k in tried[0] if all(c[k] == tried[0][k] for c in tried)]
        told = ", ".join(f"{k} {tried[0][k]}" for k in same if k != "epochs")
        yield f"- {name}: always {told}"
        for i, c in enumerate(tried):
            other = ", ".join(f"{k} {v}" for k, v in c.items() if k not in same)
            times = sum(r["chosen"] == i for r in own)
            yield f"    - {other or 'one candidate'}: {times} of {len(own)} folds"
    yield """
## Terms, steps and widths, on validation graphs of NCI1's first fold

One seed each, 411 graphs judge. *Both*: normalized heads and repelling memories, to
which a name with *both* adds one change.
"""
    rows = read("set-terms")
    for row in rows:
        row["training_loss"] = row["loss"][-1]
    columns = "variant best_validation_accuracy:.1% training_loss:.3f parameters:,"
    yield dump(rows, columns, order="training_loss")
    fast, epoch = one("benchmarks/classification"), one("benchmarks/epochs")
    yield f"## Speed\n\nOn {fast['data']}, graphs a second beside the plain model:\n"
    yield from (f"- {name}: × {x:.1f}" for name, x in fast["ratio_to_plain"].items())
    yield f"\nOn {epoch['data']}, an epoch of {epoch['graphs']:,} graphs along edges,"
    yield "without other work, and the memory that it adds to the process:\n"
    for name, x in epoch["over_gin"].items():
        low, high = epoch["spread"][name]
        added = own_memory(epoch["memory"][name])
        yield f"- {name}: {epoch['seconds'][name]:.2f} s ({low:.2f} to {high:.2f}),"
        yield f"  × {x:.1f} of our GIN; {added:.0f} MiB"
    yield "\n## Commands\n\n```sh"
    for (data, model), by in found.items():
        s = by[0]["settings"]
        given = f"--epochs {s['candidates'][0]['fit']['epochs']} --layout {s['layout']}"
        given += f" --buckets {s.get('num_buckets', 4)} --seed {s['seed']}"
        tool = "experiments/graph_classification.py"
        yield f"python {tool} --data {data} --model {model} {given}"
    yield """python experiments/set_terms.py
et_train_graphs --data MUTAG --out results/graph-classification/mutag-classifier
python experiments/classification_molecules.py
```"""


# --- speed ---

CASES = [
    f"{size} {use}" for size in ("small", "base") for use in ("inference", "training")
]


def own_memory(alone):
    return alone["peak_mib"] - alone["before_mib"]


def speed():
    bench = one("benchmarks/images")
    yield f"""The measurements behind [how fast it is](../51_performance.ipynb):
{bench["machine"]}, {bench["cores"]} cores, jax {bench["jax"]}, commit {bench["commit"]},
{bench["date"][:10]}. Importing `et_nbdev.vision.model` takes {bench["import_s"]:.1f} s.
PyTorch {bench["torch"]} differs from the library by {bench["torch_differs_by"]:.0e}, the
authors' code by {bench["authors_differ_by"]:.0e}, relative.
"""
    for case in CASES:
        row, rows = bench[case], []
        for name, rate in row["pictures_per_second"].items():
            fast, slow = (row["batch"] / s for s in row["spread"][name])
            alone, share = row["alone"][name], row.get("share_of_peak", {}).get(name)
            memory = f"{own_memory(alone):.0f} MiB", f"{alone['first_call_s']:.1f} s"
            peak = f"{share:.0%}" if share else "–"
            rows.append(
                (name, f"{rate:.1f}", f"{slow:.1f} to {fast:.1f}", *memory, peak)
            )
        yield f"## {case.capitalize()}\n\n{row['gflop_per_picture']:.2f} GFLOP a picture,"
        yield f"{row['batch']} pictures in a batch, {row['repeats']} repetitions; the whole"
        yield f"process takes {row['process_memory_over_reference']:.2f} of the memory of"
        yield "the reference's.\n"
        head = (
            "program, pictures a second, middle 80 %, own memory, first call, of peak"
        )
        yield table(head.split(", "), rows) + "\n"
    yield "`make bench` repeats the measurement."


# --- puzzles ---

PUZZLES = {
    "energy": "Energy Transformer",
    "units": "Energy Transformer, told the kinds of pairs; a size per channel",
    "attract": "all heads attract",
    "places": "all heads attract, a vector per cell instead of biases",
    "no-key": "trained without the key term",
    "transformer": "transformer block, T times",
    "units-transformer": "transformer block, T times; told the kinds of pairs",
    "hyperset": "Hyper-SET's step",
}


def puzzle_runs():
    "{(n, variant): {seed: run}}"
    found = {}
    for run in read("puzzle"):
        variant, n = run["variant"].rsplit("-", 1)
        found.setdefault((int(n), variant), {})[run["seed"]] = run
    return dict(
        sorted(
            found.items(), key=lambda item: (item[0][0], [*PUZZLES].index(item[0][1]))
        )
    )


def puzzles():
    found = puzzle_runs()
    yield """Runs of `experiments/puzzle.py`: percent of 500 test puzzles right as a whole
after T, 2 T, 4 T and 8 T steps, one start each, mean ± deviation over seeds; the share of
steps in which E rose by more than 1e-6 of itself, in all 8 T steps of eight starts; the
lowest of eight starts after 4 T steps, and how often a solved start lay below an unsolved
one of the same puzzle there. No test puzzle comes from a training board, and for 6 × 6 not
from one with other digits either; those puzzles are in `results/puzzle/tests-6.npz`. The
training of the Energy Transformer was chosen on such scores: for 6 × 6 on the first 200
puzzles of each level, for 4 × 4 on these 500. The rivals were trained alike."""
    for n in sorted({n for n, _ in found}):
        runs = {v: r for (size, v), r in found.items() if size == n}
        first = next(iter(next(iter(runs.values())).values()))
        T = first["config"]["steps"]
        for level in first["tests"]:
            head = "model, numbers, T, 2 T, 4 T, 8 T, E rose, lowest of 8, solved lower, seeds"
            rows = []
            for variant, seeds in runs.items():
                tests = [run["tests"][level] for run in seeds.values()]
                at = [
                    [100 * t["first"][k * T - 1] for t in tests] for k in (1, 2, 4, 8)
                ]
                judged = ["–"] * 3
                if "up_all" in tests[0]:
                    up, of = np.sum([t["up_all"] for t in tests], 0)
                    lower = [t["solved_lower"][2] for t in tests]
                    lower = [v for v in lower if v is not None]
                    judged = [
                        f"{up:,} of {of:,}",
                        spread([100 * t["lowest"][2] for t in tests], ".1f"),
                        f"{np.mean(lower):.0%}" if lower else "–",
                    ]
                numbers = next(iter(seeds.values()))["parameters"]
                rows.append(
                    (PUZZLES[variant], f"{numbers:,}")
                    + tuple(spread(values, ".1f") for values in at)
                    + (*judged, len(seeds))
                )
            yield f"\n## {n} × {n}, {level} givens\n\nT = {T}.\n"
            yield table(head.split(", "), rows)
    yield "\n## Each run\n"
    rows = [
        (f"{variant}-{n}", seed, f"{run['steps']:,} × {run['batch']}")
        + (f"{run['seconds'] / 60:.1f} min", f"{run['device']}, {run['cores']} cores")
        + (run["commit"], run["date"][:10])
        for (n, variant), seeds in found.items()
        for seed, run in sorted(seeds.items())
    ]
    yield table("run seed boards time machine commit date".split(), rows)
    yield "\nEach was made by `python experiments/puzzle.py RUN --seeds SEED`."


PAGES = {
    "puzzles": ("Records: number puzzles", puzzles),
    "pictures": ("Records: completing pictures", pictures),
    "small-pictures": ("Records: small runs on pictures", small_pictures),
    "odd-nodes": ("Records: odd nodes", odd_nodes),
    "whole-graphs": ("Records: whole graphs", whole_graphs),
    "speed": ("Records: speed and memory", speed),
}


def page(name):
    title, write = PAGES[name]
    front = f"---\ntitle: '{title}'\ndescription: Tables made from results/ by"
    front += " scripts/records.py.\n---\n\n"
    return front + "\n".join(write()) + "\n"


if __name__ == "__main__":
    folder = ROOT / "nbs/records"
    folder.mkdir(exist_ok=True)
    for name in PAGES:
        (folder / f"{name}.md").write_text(page(name), encoding="utf-8")
    print(f"{len(PAGES)} pages written to nbs/records")
