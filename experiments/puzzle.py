"""Trains models that solve number puzzles, their rivals, and the same model with its
energy broken on purpose; writes <out>/<variant>.json and the weights of every seed.

    python experiments/puzzle.py energy-6 transformer-6 --seeds 0 1 2 --out runs/puzzle

First all boards of a batch are new. In the last part of a run batches go on: a board is
exchanged for a new one with probability `renew`, otherwise its descent continues where
the last step of training left it, so that the model also learns at states far beyond T.
Then the energy learns to judge, too. `rest-6` goes on from the weights of `units-6`: some
solved boards descend for a thousand steps more, and one that moves costs something, so
that answers become valleys. `grown-9` begins with the weights that are shipped for 6 x 6,
and three new digits: from nothing a board of nine is hard to begin with. A run that was
stopped continues.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from puzzle_rivals import Attracting, Broken, HyperSet, Perceptron, Placed, Transformer
from tqdm import tqdm

from et_nbdev.puzzle import (
    GIVENS,
    PuzzleConfig,
    PuzzleTransformer,
    from_pretrained,
    puzzles,
    save_puzzle,
)
from et_nbdev.training import atomic_write, load_checkpoint, provenance, save_checkpoint

LEVELS = {4: [(4, 8)], 6: [(12, 18), (8, 13)], 9: [(32, 42), (30, 34)]}
SIZES = {
    4: PuzzleConfig(),
    6: PuzzleConfig(6, 64, 6, 16, 128, 12),
    9: PuzzleConfig(9, 64, 6, 16, 192, 16),
}
STEPS = {4: 4000, 6: 12000, 9: 8000}  # a quarter of it for a run after another
BATCH = {4: 64, 6: 64, 9: 32}
STARTS = {4: 8, 6: 8, 9: 2}  # of every test board
UNROLL = jax.default_backend() == "cpu"  # faster there, and slow to compile elsewhere
# of steps uphill, as fractions of |E|, ten times as high in the last part; and of an
# energy that judges wrong
PRICES = dict(price=30.0, judge=0.1)
# a quarter of the solved boards are exchanged with probability `longer`, and a solved
# board that moves costs `rest` times how far
REST = dict(after="units", alone=0.0, rate=5e-4, longer=0.01, rest=0.1) | PRICES
GROWN = dict(after="sudoku-6", rate=3e-3) | PRICES
BASES = {4: 5000, 6: 40000, 9: 3000}  # puzzles to train on, each with random givens


def sized(config, build=PuzzleTransformer, *, rngs, **changes):
    "A model with some fields of its configuration changed."
    return build(replace(config, **changes), rngs=rngs)


# name: how to build the model, and what differs in training
VARIANTS = {
    "energy": (PuzzleTransformer, {}),
    "units": (partial(sized, units=True, channels=True), PRICES),
    "rest": (partial(sized, units=True, channels=True), REST),
    "grown": (partial(sized, units=True, channels=True), GROWN),
    "attract": (Attracting, {}),
    "places": (Placed, {}),
    "transformer": (Transformer, {}),
    "units-transformer": (partial(sized, build=Transformer, units=True), {}),
    "hyperset": (HyperSet, {}),
    "perceptron": (Perceptron, dict(renew=1.0)),
} | {
    "no-" + name: (partial(Broken, broken=name.split("+")), {})
    for name in ("key", "values", "memory", "order", "key+values+memory+order")
}


def bases(n: int, folder: Path):
    """Full boards and masks of the fewest givens that determine them, for training, and
    500 of each level for tests. No test board is a training board with its digits
    renamed (n = 4: half of the 288 boards are kept for tests).
    """
    path = folder / f"puzzles-{n}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fewest = 0 if n < 9 else 30
        given, full = puzzles(n, BASES[n], (fewest, fewest), seed=1)
        tests = [
            puzzles(n, 500, level, seed=2 + i) for i, level in enumerate(LEVELS[n])
        ]
        if n == 4:
            boards = np.unique(full, axis=0)
            test = np.random.default_rng(0).permutation(len(boards))[: len(boards) // 2]
            held = {bytes(b) for b in boards[test].astype(np.int8)}
            pool, pool_full = puzzles(n, 2000, LEVELS[4][0], seed=2)
            keep = np.array([bytes(b) in held for b in pool_full.astype(np.int8)])
            tests = [(pool[keep][:500], pool_full[keep][:500])]
            code = lambda b: bytes(b.astype(np.int8))
        else:  # the digits renamed so that the first row is 1 … n
            code = lambda b: bytes(b[0].argsort()[b - 1].astype(np.int8))
            held = {code(b) for _, boards in tests for b in boards}
        train = np.array([code(b) not in held for b in full])
        arrays = dict(full=full[train].astype(np.int8), given=(given > 0)[train])
        for i, (board, answer) in enumerate(tests):
            arrays |= {
                f"test{i}": board.astype(np.int8),
                f"answer{i}": answer.astype(np.int8),
            }
        with atomic_write(path) as temporary:
            with open(temporary, "wb") as f:
                np.savez_compressed(f, **arrays)
    return dict(np.load(path))


def turned(key, full, given):
    """Boards of nine and their givens with rows exchanged within bands, bands with each
    other, and columns likewise. (Of 6 x 6 so few are different that boards for tests
    would be among them.)
    """

    def lines(key):
        order = jax.vmap(partial(jax.random.permutation, x=3))(jax.random.split(key, 4))
        return (3 * order[0][:, None] + order[1:]).ravel()

    def one(key, *boards):
        rows, columns = map(lines, jax.random.split(key))
        return [board[rows][:, columns] for board in boards]

    return jax.vmap(one)(jax.random.split(key, len(full)), full, given)


def draw(key, full, given, n: int, batch: int):
    "A batch of puzzles (B, n, n) and their solutions."
    which, names, order, number = jax.random.split(key, 4)
    at = jax.random.randint(which, (batch,), 0, len(full))
    full, given = full[at], given[at]
    if n == 9:
        full, given = turned(jax.random.fold_in(names, 1), full, given)
    full, given = full.reshape(batch, -1).astype(int), given.reshape(batch, -1)
    if n > 4:  # of the 288 boards, renaming would give those for tests
        rename = jax.vmap(partial(jax.random.permutation, x=n))
        renamed = rename(jax.random.split(names, batch)) + 1
        full = jnp.take_along_axis(renamed, full - 1, 1)
    rank = (
        jnp.where(given, -1, jax.random.uniform(order, given.shape))
        .argsort(-1)
        .argsort(-1)
    )
    low, high = GIVENS[n]
    count = jax.random.randint(number, (batch, 1), low, high + 1)
    shown = rank < jnp.maximum(count, given.sum(-1, keepdims=True))
    board = lambda cells: cells.reshape(batch, n, n)
    return board(jnp.where(shown, full, 0)), board(full)


def loss(model, x, boards, full, fresh, price, judge, rest=0.0):
    """Cross-entropy of the empty cells after every step, weighted .1 … 1 for a new
    board, and the price of steps uphill. Where boards come in pairs, two starts of one
    puzzle, the end that is nearer to the answer is to have the lower energy. With
    `rest` a solved board also pays for how far one more step moves it, as a fraction of
    the length of its state. Returns the last states, too.
    """
    steps = model.config.steps
    last, (energies, path) = model.descend(x, steps, states=True, unroll=UNROLL)
    logits = model.logits(path[1:])
    digits = jnp.broadcast_to((full - 1).reshape(len(full), -1), logits.shape[:-1])
    wrong = optax.softmax_cross_entropy_with_integer_labels(logits, digits)
    empty = (boards == 0).reshape(len(boards), -1)
    each = (wrong * empty).sum(-1) / jnp.maximum(empty.sum(-1), 1)
    weight = jnp.where(fresh, jnp.linspace(0.1, 1, steps)[:, None], 1.0)
    value = ((each * weight).sum(0) / weight.sum(0)).mean()
    if price is not None:
        E = energies.total
        value += price * jnp.mean(jax.nn.relu(E[1:] - E[:-1]) / jnp.abs(E[:-1]))
        right = jax.lax.stop_gradient(jnp.exp(-each[-1]))
        better, lower = right[::2] - right[1::2], E[-1, 1::2] - E[-1, ::2]
        apart = jnp.abs(better) * jax.nn.softplus(-jnp.sign(better) * lower)
        value += judge * apart.mean()
    if rest:
        length = lambda x: jnp.linalg.norm(x, axis=(-1, -2))
        moved = length(model.descend(last, 1)[0] - last) / length(last)
        solved = (logits[-1].argmax(-1) == digits[-1]).all(-1)
        value += rest * (moved * solved).mean()
    return value, (last, each[-1].mean())


def trainer(
    build,
    data,
    n: int,
    batch: int,
    rate=4e-3,
    renew=0.25,
    price=0.0,
    judge=0.0,
    longer=None,
    rest=0.0,
    alone=0.7,
):
    """How a run begins, key → state; some of its steps, (state, total, count)
    → (state, losses); and how parameters become a model.

    In the first part of a run, `alone`, all boards are new. The rate warms up over 100
    steps and falls to zero as a cosine.
    """
    full, given = jnp.asarray(data["full"]), jnp.asarray(data["given"])
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.99))
    graph = nnx.graphdef(build(SIZES[n], rngs=nnx.Rngs(0)))
    model_of = lambda params: nnx.merge(graph, params)
    starts = 2 if judge else 1
    ends = np.full(batch // starts, renew)  # of solved boards
    ends[: len(ends) // 4] = longer or renew

    def begin(key):
        of_model, of_batch = jax.random.split(key)
        params = nnx.state(build(SIZES[n], rngs=nnx.Rngs(of_model)), nnx.Param)
        params = nnx.to_pure_dict(params)
        boards, answer = draw(of_batch, full, given, n, batch)
        x = model_of(params).encode(boards, of_batch)
        return params, adam.init(params), of_batch, x, boards, answer

    def step(state, done):
        params, opt, key, x, boards, answer = state
        key, of_boards, of_x, of_renewal = jax.random.split(key, 4)
        new = draw(of_boards, full, given, n, batch // starts)
        new = tuple(jnp.repeat(a, starts, 0) for a in new)
        ready = (model_of(params).logits(x).argmax(-1) + 1).reshape(answer.shape)
        solved = (ready == answer).reshape(batch // starts, -1).all(-1)
        again = jnp.where(solved, ends, renew)
        fresh = jax.random.bernoulli(of_renewal, jnp.where(done < alone, 1.0, again))
        fresh = jnp.repeat(fresh, starts)
        fresh |= ~jnp.isfinite(x).all((-1, -2))
        pick = lambda a, b: jnp.where(fresh.reshape(-1, *[1] * (a.ndim - 1)), a, b)
        boards, answer = pick(new[0], boards), pick(new[1], answer)
        late = done >= alone
        prices = (price * (1 + 9 * late), judge * late) if judge else (None, None)

        def objective(params):
            model = model_of(params)
            start = pick(model.encode(boards, of_x), x)
            return loss(model, start, boards, answer, fresh, *prices, rest)

        (value, (x, last)), slope = jax.value_and_grad(objective, has_aux=True)(params)
        good = jnp.isfinite(optax.global_norm(slope))
        slope = jax.tree.map(lambda s: jnp.where(good, s, 0), slope)
        change, opt = adam.update(slope, opt, params)
        count = optax.tree_utils.tree_get(opt, "count")
        size = rate * jnp.minimum(1, count / 100) * (1 + jnp.cos(jnp.pi * done)) / 2
        params = jax.tree.map(lambda p, c: p - size * c, params, change)
        return (params, opt, key, x, boards, answer), last

    def some(state, total, count):
        first = optax.tree_utils.tree_get(state[1], "count")
        return jax.lax.scan(step, state, (first + jnp.arange(count)) / total)

    return jax.jit(begin), jax.jit(some, static_argnums=2), model_of


def grown(drawn, small):
    "`small` in the first places of a larger array; the others as drawn, at its scale."
    rest = drawn * small.std() / jnp.maximum(drawn.std(), 1e-9)
    return rest.at[tuple(map(slice, small.shape))].set(small)


@partial(jax.jit, static_argnums=(0, 4, 5))
def follow(model_of, params, boards, key, steps, starts):
    "Energies (steps + 1, starts, B), or None, and digits of every cell at every step."
    model = model_of(params)
    many = jnp.broadcast_to(boards, (starts, *boards.shape))

    def more(x, _):
        last, (energies, _) = model.descend(x, 1)
        E = getattr(energies, "total", None)
        digits = model.logits(last).argmax(-1) + 1
        given = many.reshape(digits.shape)
        return last, (E if E is None else E[0], jnp.where(given > 0, given, digits))

    x, (E, digits) = jax.lax.scan(more, model.encode(many, key), length=steps)
    if E is not None:
        E = jnp.concatenate([E, model.block.energy(model.block.norm(x))[None]])
    return E, digits.astype(jnp.int8)


def score(model_of, params, data, n: int, times=8) -> dict:
    "How many test boards are right after every step, and how E behaves on the way."
    T, rows = SIZES[n].steps, {}
    for i, level in enumerate(LEVELS[n]):
        board, answer = jnp.asarray(data[f"test{i}"], int), data[f"answer{i}"]
        E, digits = follow(
            model_of, params, board, jax.random.key(7), times * T, STARTS[n]
        )
        right = (np.asarray(digits) == answer.reshape(len(answer), -1)).all(-1)
        row = dict(right=right.mean((1, 2)).round(5).tolist())  # of single starts
        row["first"] = right[:, 0].mean(1).round(5).tolist()  # of the first start alone
        if E is not None:
            E = np.asarray(E, float)
            change, noise = np.diff(E, axis=0), 1e-6 * np.abs(E[:-1])
            for name, part in (("within", slice(0, T)), ("all", slice(None))):
                up = change[part] > noise[part]
                row[f"up_{name}"] = [
                    int(up.sum()),
                    int((np.abs(change) > noise)[part].sum()),
                ]
            at = [t * T - 1 for t in (1, 2, 4, 8) if t <= times]
            lowest = E[1:][at].argmin(1)  # (times, B)
            row["lowest"] = [
                float(right[t, low, np.arange(len(board))].mean())
                for t, low in zip(at, lowest)
            ]
            row["any"] = [float(right[t].any(0).mean()) for t in at]
            good, bad = right[at], ~right[at]
            pairs = good[:, :, None] & bad[:, None]
            e = E[1:][at]
            below = (e[:, :, None] < e[:, None]) & pairs
            row["solved_lower"] = [
                float(b / p) if p else None
                for b, p in zip(below.sum((1, 2, 3)), pairs.sum((1, 2, 3)))
            ]
        rows["-".join(map(str, level))] = row
    return rows


def train(variant: str, seed: int, options):
    "Train, save and score a variant with a seed, unless its result is there already."
    if (options.out / f"{variant}-seed{seed}.json").exists():
        return
    name, n = variant.rsplit("-", 1)
    build, changes = VARIANTS[name]
    n, data = int(n), bases(int(n), options.out)
    steps, batch = options.steps or STEPS[n], options.batch or BATCH[n]
    how = dict(changes)
    before = how.pop("after", None)
    begin, some, model_of = trainer(build, data, n, batch, **how)
    state, done, spent, curve = begin(jax.random.key(seed)), 0, 0.0, []
    if before == "units":
        steps //= 4
        before = options.out / f"units-{n}-seed{seed}.safetensors"
        if not before.exists():
            train(f"units-{n}", seed, options)
    if before:
        small = nnx.to_pure_dict(nnx.state(from_pretrained(before), nnx.Param))
        state = (jax.tree.map(grown, state[0], small), *state[1:])
    path = options.out / f"{variant}-seed{seed}.run"
    plain = lambda s: s[:2] + (jax.random.key_data(s[2]),) + s[3:]
    if path.exists():
        saved, meta = load_checkpoint(path, plain(state))
        state = saved[:2] + (jax.random.wrap_key_data(saved[2]),) + saved[3:]
        done, spent, curve = meta["done"], meta["spent"], meta["curve"]
    bar = tqdm(total=steps, initial=done, unit="step", desc=path.stem, file=sys.stderr)
    while done < steps:
        began, count = time.time(), min(options.every, steps - done)
        state, values = some(state, steps, count)
        value = float(values.mean())
        done, spent = done + count, spent + time.time() - began
        curve.append([done, round(value, 5)])
        bar.update(count)
        bar.set_postfix(loss=f"{value:.4f}")
        save_checkpoint(path, plain(state), dict(done=done, spent=spent, curve=curve))
    bar.close()
    params = state[0]
    save_puzzle(
        path.with_suffix(".safetensors"), model_of(params), dict(variant=variant)
    )
    result = dict(
        variant=variant,
        seed=seed,
        config=vars(SIZES[n]),
        changes=changes,
        batch=batch,
        steps=steps,
        parameters=sum(a.size for a in jax.tree.leaves(params)),
        seconds=round(spent, 1),
        curve=curve,
        tests=score(model_of, params, data, n),
        **provenance(),
    )
    with atomic_write(path.with_suffix(".json")) as temporary:
        temporary.write_text(json.dumps(result))
    for level, row in result["tests"].items():
        at = [row["first"][t * SIZES[n].steps - 1] for t in (1, 2, 4, 8)]
        rest = {k: v for k, v in row.items() if k not in ("right", "first")}
        print(f"{path.stem}, {level} givens:", at, rest, flush=True)


def far(variant: str, seed: int, options, times=64):
    "Write how many test boards of a finished run are right far beyond T, and E there."
    name, n = variant.rsplit("-", 1)
    n, build = int(n), VARIANTS[name][0]
    data, T = bases(n, options.out), SIZES[n].steps
    begin, _, model_of = trainer(build, data, n, batch=2)
    like = begin(jax.random.key(0))[:1]
    (params,), _ = load_checkpoint(options.out / f"{variant}-seed{seed}.run", like)
    at = [T * 2**k - 1 for k in range(times.bit_length())]
    result = dict(variant=variant, seed=seed, at=[t + 1 for t in at], **provenance())
    for i, level in enumerate(LEVELS[n]):
        board, answer = jnp.asarray(data[f"test{i}"], int), data[f"answer{i}"]
        E, digits = follow(model_of, params, board, jax.random.key(7), times * T, 1)
        right = (np.asarray(digits) == answer.reshape(len(answer), -1)).all(-1)
        row = dict(right=right[at].mean((1, 2)).round(5).tolist())
        if E is not None:
            row["E"] = np.asarray(E)[1:][at].mean((1, 2)).round(1).tolist()
        result["-".join(map(str, level))] = row
    with atomic_write(options.out / f"{variant}-far-seed{seed}.json") as temporary:
        temporary.write_text(json.dumps(result))
    print(variant, seed, *[result[k] for k in result if k[0].isdigit()], flush=True)


def main():
    parse = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parse.add_argument("variants", nargs="+", metavar="name-n", help=" ".join(VARIANTS))
    parse.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parse.add_argument("--steps", type=int, help="of training; otherwise by n")
    parse.add_argument(
        "--every", type=int, default=50, help="steps between checkpoints"
    )
    parse.add_argument("--batch", type=int, help="boards per step; otherwise by n")
    parse.add_argument("--out", type=Path, default=Path("runs/puzzle"))
    parse.add_argument(
        "--far", action="store_true", help="count how finished runs do far beyond T"
    )
    options = parse.parse_args()
    for seed in options.seeds:
        for variant in options.variants:
            (far if options.far else train)(variant, seed, options)


if __name__ == "__main__":
    main()
