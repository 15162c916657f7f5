"""What the runs of results/ printed, as tables in nbs/records/. The text of a page is in
scripts/pages, with {{names}} in the places of its tables. The lessons summarize the same
files, and read them by the functions at the top.

    python scripts/records.py        writes the pages; a test compares them with results/
"""

import json
import re
import tomllib
from pathlib import Path

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
# How things are called, in the order of tables.
NAMES = tomllib.loads((ROOT / "scripts/pages/names.toml").read_text(encoding="utf-8"))
MODELS, LINES, METRICS = (NAMES[kind] for kind in ("models", "lines", "metrics"))
CLASSIFIERS, PUZZLES = NAMES["classifiers"], NAMES["puzzles"]

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
        self.half = np.inf
        if self.n > 1:
            error = np.std(self.each, ddof=1) * np.sqrt(1 / self.n + overlap)
            self.half = stats.t.ppf(0.975, self.n - 1) * error

    @property
    def word(self):
        decided = abs(self.mean) > self.half
        return ("higher" if self.mean > 0 else "lower") if decided else "undecided"

    def told(self, digits=".4f"):
        half = f" ± {self.half:{digits}}" if self.n > 1 else " (one run)"
        return f"{self.mean:+z{digits}}{half}".replace("-", "−")


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


def dump(columns, groups, head="", minus=(), score="test_mse", overlap=0.0, order=None):
    """A table: a row for every group, {label: {seed: row}}, or for every row of a list.
    `columns` are entries with their formats, 'validation_mse:.4f seed'. `minus`
    {head: label, or a function of the label}: differences of `score` from that group.
    """
    minus, rows = dict(minus), []
    if not isinstance(groups, dict):
        groups = dict(enumerate({0: row} for row in groups))
    if order:
        mean = lambda label: np.mean([look(r, order) for r in groups[label].values()])
        groups = {label: groups[label] for label in sorted(groups, key=mean)}
    columns = [c.partition(":")[::2] for c in columns.split()]
    digits = dict(columns).get(score, ".4f")
    for label, by in groups.items():
        row = [] if not head else [*label] if isinstance(label, tuple) else [label]
        row += [said([look(r, path) for r in by.values()], f) for path, f in columns]
        for base in minus.values():
            base = groups.get(base(label) if callable(base) else base, by)
            alike = base is by or not base.keys() & by.keys()
            row.append("–" if alike else Gap(by, base, score, overlap).told(digits))
        rows.append(row)
    short = lambda path: re.sub(r"[._]", " ", path.removeprefix("config.model."))
    names = head.split(", ") if head else []
    return table([*names, *(short(path) for path, _ in columns), *minus], rows)


def hours(rows):
    return f"{sum(row['seconds'] for row in rows) / 3600:.1f}"


def commits(rows):
    return ", ".join(sorted({row["commit"] for row in rows}))


def filled(name, values):
    """The text of a page, with a value in the place of every {{name}}. Of a table,
    {{name: columns}}, the value is what else `dump` takes.
    """
    text = (ROOT / f"scripts/pages/{name}.md").read_text(encoding="utf-8")
    value = lambda m: dump(m[2], *values[m[1]]) if m[2] else str(values[m[1]])
    return re.sub(r"\{\{(\w+)(?:: ([^}]*))?\}\}", value, text)


# --- completing pictures ---


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


def points(run):
    "{pictures seen: validation error}"
    return {p["pictures"]: p["validation"] for p in run["curve"] if "validation" in p}


def commands(*folders):
    "The commands that make the full runs of some folders."
    lines, key = [], ("name", "steps", "lr", "kind")
    for folder in folders:
        for (name, steps, lr, kind), by in grouped(read(folder), *key).items():
            line = f"python experiments/image_pair.py --steps {steps} --lr {lr:g}"
            line += " --data cifar10" * kind.startswith("cifar")
            line += " --weight-decay 0" * kind.endswith("decay-0")
            line += f" --out results/{folder}" * (folder != "image-pair")
            line += " --trial-steps 225" * (steps == 450)
            line += f" \\\n    --only {name} --seeds {' '.join(map(str, by))}"
            if (steps, folder) != (450, "image-pair"):  # those chose rates
                lines.append(line)
    return "\n".join(sorted(lines))


def pictures():
    full, error, whole = full_runs(), "validation_mse", {"minus full": "full"}
    terms, broken = (
        (grouped(read(folder), "name"), "variant", whole, error, 0, error)
        for folder in ("image-terms", "image-broken")
    )
    others = "transformer", "transformer-gated-operations", "et-metric-operations"
    others += "et-metric-operations-free", "hyperset-operations"
    others = {f"minus {MODELS[n]}": lambda k, n=n: (k[0], n) for n in others}
    every = picture_runs() + picture_runs("image-rates") + picture_runs(data="cifar10")
    passes = {n: by.values() for (steps, n), by in full.items() if steps == 10_938}
    mean = lambda runs, seen: f"{np.mean([points(run)[seen] for run in runs]):.4f}"
    curve = [
        (seen // 1000, *(mean(runs, seen) for runs in passes.values()))
        for seen in points(next(iter(full[10_938, next(iter(passes))].values())))
    ]
    cost = one("benchmarks/pair")
    ms = lambda name: np.array([cost["seconds"][name], *cost["spread"][name]]) * 1e3
    told = "{:.0f} (middle 80 %: {:.0f} to {:.0f})"
    costs = [
        (MODELS[name], told.format(*ms(name)), f"{ratio:.2f}")
        for name, ratio in cost["over_transformer"].items()
    ]
    return dict(
        broken=broken,
        terms=terms,
        full=(full, "steps, name", others),
        every=[every],
        passes=table(("", *(MODELS[name] for name in passes)), curve),
        onward=[read("image-rest")],
        memories=[one("image-memories")],
        batch=cost["batch_size"],
        cost=table(("model", "median", "beside the transformer's"), costs),
        commands=commands("image-pair", "image-rates"),
    )


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
    fills = one("image-dynamics/fills")["fills"]
    compared = {f"minus {name}": name for name in ("ET-Full", "ET-NoHN")}
    tuning = one("tiny-imagenet-2026-11-21/tuning")["runs"]
    return dict(
        parts=(parts(), "setting", compared, "error", 0, "error"),
        tuning=(tuning, "", (), "", 0, "validation_mse"),
        rest=(rest_runs(), "model", {"best minus that of T = 6": "T = 6"}, "best"),
        fills=({name: {0: row} for name, row in fills.items()}, "fill"),
    )


# --- odd nodes ---

OFFICIAL = ("minesweeper", "official"), ("tolokers", "official")
CARDS = "transactions", "time"
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
    """n_test / n_train: two thirds of what does not train are for the test; official
    splits train on half and test on a quarter; those that look ahead train on six
    periods, the middle one, and test on one.
    """
    fixed = {"official": 1 / 2, "time": 1 / 6}
    return fixed.get(share) or 2 / 3 * (1 - share) / share


def margin(found, data, share, line, rival, metric="auroc"):
    a, b = (found[data, share, name] for name in (line, rival))
    return Gap(a, b, f"test.{metric}", overlap(share))


def best_of(trials):
    "Of macro-F1 and AUROC on validation nodes."
    merit = lambda r: r["validation"]["macro_f1"] + r["validation"]["auroc"]
    return max(trials, key=merit)


def odd_nodes():
    found, scores, kinds = lines(), [], []
    final = [r for by in found.values() for r in by.values()]
    trials = [r for by in found.values() for r in by[0]["trials"]]
    for run in final:
        run["features"] = run["config"].get("scale", "")
    bases = "et et-2hop boosting-2hop bwgnn et-2hop-labels bwgnn-2hop-labels mlp"
    digits = ("digits-relations", 0.01), ("digits-relations", 0.4)
    others = *digits, ("amazon-upu-alike", 0.4), *OFFICIAL, CARDS
    named = {"official": "official splits", "time": "splits that look ahead"}
    for data, share in (*GRAPHS, *others):
        own = {k[2]: by for k, by in found.items() if k[:2] == (data, share)}
        of = named.get(share) or f"{share:.0%} of the labels"
        scores.append(f"## {data}, {of}")
        for m, name in METRICS.items():
            columns = f"test.{m}:.1%" + " features seconds:.1f" * (m == "auroc")
            minus = {f"{name} minus {b}": b for b in bases.split() if b in own}
            rows = own, "line", minus, f"test.{m}", overlap(share)
            scores.append(dump(columns, *rows))
    for data in ("digits-relations", "amazon-upu-alike"):
        for line in ("et-max", "et-concat"):
            a, b = (found[data, 0.4, n][0]["trials"][:8] for n in (line, "et"))
            a, b = dict(enumerate(a)), dict(enumerate(b))
            gaps = (Gap(a, b, f"validation.{m}").mean for m in METRICS)
            kinds.append((data, line, *(f"{gap:+.1%}" for gap in gaps)))
    auroc = lambda trials: f"{best_of(trials)['test']['auroc']:.1%}"
    budgets = [
        (data, f"{share:.0%}", line, auroc(tried[:8]), auroc(tried))
        for (data, share, line), by in found.items()
        for tried in [by[0]["trials"]]
        if line in LINES and len(tried) >= 16
    ]
    terms = grouped(read("graph-terms"), "data", "variant"), "graph, variant"
    terms += ({"minus the tuned model": lambda k: (k[0], "as-found")},)
    return dict(
        files=len(found),
        trials=len(trials),
        runs=len(final),
        hours=hours(final + trials),
        commits=commits(final),
        scores="\n\n".join(scores),
        kinds=table(("graph", "line", *METRICS.values()), kinds),
        terms=(*terms, "validation.auroc"),
        terms_test=(*terms, "test.auroc"),
        budgets=table(("graph", "labels", "line", "eight", "sixteen"), budgets),
    )


# --- whole graphs ---

SETS = "MUTAG PROTEINS ENZYMES NCI1 NCI109 Mutagenicity DD".split()
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


def chosen(found):
    "What the folds of each model chose, of which candidates."
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


def whole_graphs():
    found, terms = folds(), read("set-terms")
    every = [r for by in found.values() for r in by.values()]
    mean = lambda by: np.mean([r["learning"] for r in by.values()], 0)
    curves = [(*key, *(f"{v:.1%}" for v in mean(by))) for key, by in found.items()]
    for row in terms:
        row["training_loss"] = row["loss"][-1]
    others = [*CLASSIFIERS.items()][:4]
    others = {f"minus {name}": lambda k, m=m: (k[0], m) for m, name in others}
    epoch = one("benchmarks/epochs")
    epochs = [
        f"- {n}: {s:.2f} s ({epoch['spread'][n][0]:.2f} to {epoch['spread'][n][1]:.2f}),"
        f"\n  × {epoch['over_gin'][n]:.1f} of our GIN;"
        f" {own_memory(epoch['memory'][n]):.0f} MiB"
        for n, s in epoch["seconds"].items()
    ]
    tool, made = "python experiments/graph_classification.py", []
    for (data, model), by in found.items():
        s = by[0]["settings"]
        given = f"--epochs {s['candidates'][0]['fit']['epochs']} --seed {s['seed']}"
        then = "  # then as padded tables" if s["layout"] == "dense" else ""
        made.append(f"{tool} --data {data} --model {model} {given}{then}")
    return dict(
        folds=len(every),
        trainings=f"{sum(len(r['candidates']) for r in every):,}",
        hours=hours(every),
        commits=commits(every),
        accuracy=(found, "set, model", others, *ACCURACY.values()),
        learning=table(("set", "model", "10 %", "25 %", "50 %", "100 %"), curves),
        chosen="\n".join(chosen(found)),
        terms=(terms, "", (), "", 0, "training_loss"),
        epoch_data=epoch["data"],
        epoch_graphs=f"{epoch['graphs']:,}",
        epochs="\n".join(epochs),
        commands="\n".join(made),
    )


# --- speed ---

CASES = [
    f"{size} {use}" for size in ("small", "base") for use in ("inference", "training")
]


def own_memory(alone):
    return alone["peak_mib"] - alone["before_mib"]


def speed():
    bench, parts = one("benchmarks/images"), []
    head = "program, pictures a second, middle 80 %, own memory, first call, of peak"
    for case in CASES:
        row, rows = bench[case], []
        for name, rate in row["pictures_per_second"].items():
            fast, slow = (row["batch"] / s for s in row["spread"][name])
            alone, share = row["alone"][name], row.get("share_of_peak", {}).get(name)
            memory = f"{own_memory(alone):.0f} MiB", f"{alone['first_call_s']:.1f} s"
            times = f"{rate:.1f}", f"{slow:.1f} to {fast:.1f}"
            rows.append((name, *times, *memory, f"{share:.0%}" if share else "–"))
        parts.append(f"""## {case.capitalize()}

{row["gflop_per_picture"]:.2f} GFLOP a picture,
{row["batch"]} pictures in a batch, {row["repeats"]} repetitions; the whole
process takes {row["process_memory_over_reference"]:.2f} of the memory of
the reference's.

{table(head.split(", "), rows)}""")
    return bench | dict(
        day=bench["date"][:10],
        import_s=f"{bench['import_s']:.1f}",
        torch_differs_by=f"{bench['torch_differs_by']:.0e}",
        authors_differ_by=f"{bench['authors_differ_by']:.0e}",
        cases="\n\n".join(parts),
    )


# --- puzzles ---


SHORT = {  # folders of results, and how their runs were trained
    "puzzle": "",
    "puzzle-broken/1200": ", a tenth of the training",
    "puzzle-broken/2400": ", a fifth of the training",
}


def puzzle_runs(folder="puzzle"):
    "{(n, variant): {seed: run}}"
    rows = read(folder)
    for row in rows:
        row["kind"], _, n = row["variant"].rpartition("-")
        row["n"] = int(n)
    rows.sort(key=lambda row: (row["n"], [*PUZZLES].index(row["kind"])))
    return grouped(rows, "n", "kind")


def puzzle_row(variant, runs, level):
    "Of a table of one level: how often a variant is right, and what its energy does."
    tests, T = [run["tests"][level] for run in runs], runs[0]["config"]["steps"]
    right = ([100 * t["first"][k * T - 1] for t in tests] for k in (1, 2, 4, 8))
    energy = ["–"] * 3
    if "up_all" in tests[0]:
        up, of = np.sum([t["up_all"] for t in tests], 0)
        lower = [t["solved_lower"][2] for t in tests]
        lower = [v for v in lower if v is not None]
        lowest = spread([100 * t["lowest"][2] for t in tests], ".1f")
        lower = f"{np.mean(lower):.0%}" if lower else "–"
        energy = f"{up:,} of {of:,}", lowest, lower
    about = PUZZLES[variant], f"{runs[0]['parameters']:,}"
    return *about, *(spread(each, ".1f") for each in right), *energy, len(runs)


def puzzles():
    found, scores = {folder: puzzle_runs(folder) for folder in SHORT}, []
    head = "model, numbers, T, 2 T, 4 T, 8 T, E rose, lowest of 8, solved lower, seeds"
    for folder, n in sorted({(f, n) for f, by in found.items() for n, _ in by}):
        runs = {v: [*by.values()] for (m, v), by in found[folder].items() if m == n}
        first = next(iter(runs.values()))[0]
        own = head.replace("of 8", "of 2") if n == 9 else head
        for level in first["tests"]:
            rows = [puzzle_row(variant, each, level) for variant, each in runs.items()]
            title = f"## {n} × {n}, {level} givens{SHORT[folder]}"
            scores += [title, f"T = {first['config']['steps']}."]
            scores.append(table(own.split(", "), rows))
    rows = [
        (r["variant"], r["seed"], f"{r['steps']:,} × {r['batch']}")
        + (f"{r['seconds'] / 60:.1f} min", f"{r['device']}, {r['cores']} cores")
        + (r["commit"], r["date"][:10])
        for runs in found.values()
        for by in runs.values()
        for _, r in sorted(by.items())
    ]
    runs = table("run seed boards time machine commit date".split(), rows)
    return dict(scores="\n\n".join(scores), runs=runs)


PAGES = {
    "puzzles": puzzles,
    "pictures": pictures,
    "small-pictures": small_pictures,
    "odd-nodes": odd_nodes,
    "whole-graphs": whole_graphs,
    "speed": speed,
}


def page(name):
    return filled(name, PAGES[name]())


if __name__ == "__main__":
    for name in PAGES:
        (ROOT / f"nbs/records/{name}.md").write_text(page(name), encoding="utf-8")
    print(f"{len(PAGES)} pages written to nbs/records")
