// A number puzzle that fills itself in: type digits, let the energy fall, and see what the
// model believes of every empty cell. Everything runs in this browser.

import { BOXES, PuzzleTransformer, conflicts, puzzle, solutions } from "./board.js";
import { readSafetensors } from "./engine.js";
import { button, curveOf, drawCurves, element, fetched, rounded, slider, whenSeen } from "./parts.js";

const SIZES = [4, 6]; // for which there are weights, sudoku-4.safetensors …
const GIVENS = { 4: 7, 6: 14 }; // of a new puzzle; a harder one has as few as it can
const INVITATION = "Choose a cell and type a digit: the others fill in as the energy falls.";
const LASTS = 2500; // milliseconds that a descent is shown
const STILL = matchMedia("(prefers-reduced-motion: reduce)").matches; // only the end

const best = (p) => p.indexOf(Math.max(...p)) + 1;

class Puzzle {
  constructor(root) {
    this.nets = {};
    this.path = [];
    this.t = 0;
    this.build(root);
  }

  // --- the page ---

  build(root) {
    const named = { role: "grid", "aria-label": "Board. Arrows move, digits fill in, 0 clears." };
    this.grid = element("div", { className: "puzzle-board", set: named });
    this.pad = element("div", { className: "puzzle-pad", set: { role: "group", "aria-label": "Digits" } });
    this.grid.onkeydown = (event) => this.press(event);
    const chosen = () => this.open(SIZES[size.selectedIndex]).catch(() => {});
    const size = (this.size = element("select", { onchange: chosen }));
    size.append(...SIZES.map((n) => element("option", { textContent: `${n} × ${n}` })));
    this.player = button("Play", () => this.play(!this.playing));
    this.time = slider("step t", { min: 0, max: 64, value: 0 }, (e) => {
      this.play(false);
      this.show(+e.target.value);
    });
    this.without = element("input", { type: "checkbox", onchange: () => this.start(this.first) });
    this.curve = curveOf(170);
    this.status = element("p", { className: "play-status", set: { "aria-live": "polite" } });
    const set = (board) => () => this.wake().then(() => this.fill(board()));
    root.replaceChildren(
      element("p", { className: "puzzle-invitation", textContent: INVITATION }),
      element("div", { className: "puzzle-left" }, this.grid, this.pad),
      element(
        "div",
        { className: "play-controls" },
        ...(SIZES.length > 1 ? [element("label", {}, "board", size)] : []),
        element(
          "div",
          { className: "play-buttons" },
          this.player,
          button("New puzzle", set(() => puzzle(this.n, GIVENS[this.n]))),
          button("Harder", set(() => puzzle(this.n, 0))),
          button("Another start", () => this.wake().then(() => this.start())),
          button("Empty board", set(() => Array(this.n ** 2).fill(0))),
        ),
        this.time.row,
        element("label", { className: "puzzle-switch" }, this.without, "without the key term: E may rise"),
        this.curve,
        this.status,
      ),
    );
  }

  /** Load the model, once. */
  wake() {
    this.waking ??= this.open(SIZES[0]);
    return this.waking;
  }

  async open(n) {
    this.say("Loading the model …");
    const name = `sudoku-${n}.safetensors`;
    try {
      if (!this.nets[n]) {
        const bytes = await (await fetched(name)).arrayBuffer();
        this.nets[n] = new PuzzleTransformer(readSafetensors(bytes));
      }
      this.net = this.nets[n];
    } catch (error) {
      if (!this.n) this.waking = null;
      this.size.selectedIndex = Math.max(0, SIZES.indexOf(this.n));
      this.say(`${error.message}. Are you offline, or is this no page of a server?`);
      throw error;
    }
    this.n = n;
    this.depth = this.net.config.steps;
    this.time.input.max = this.last = 8 * this.depth;
    this.lay();
    this.fill(puzzle(n, GIVENS[n]));
  }

  /** Cells and keys of a board of this size. */
  lay() {
    const { n } = this;
    const [height, width] = BOXES[n];
    const digits = Array.from({ length: n }, (_, i) => i + 1);
    this.cells = Array.from({ length: n * n }, (_, at) => {
      const [row, column] = [Math.floor(at / n), at % n];
      const cell = button("", () => this.stand(at));
      cell.setAttribute("role", "gridcell");
      cell.classList.toggle("puzzle-right", column % width === width - 1 && column < n - 1);
      cell.classList.toggle("puzzle-down", row % height === height - 1 && row < n - 1);
      cell.append(...digits.map((textContent) => element("span", { textContent })));
      return cell;
    });
    const rows = digits.map((row) =>
      element("div", { set: { role: "row" } }, ...this.cells.slice((row - 1) * n, row * n)),
    );
    this.grid.style.setProperty("--n", n);
    this.grid.replaceChildren(...rows);
    const keys = digits.map((digit) => button(digit, () => this.put(digit)));
    this.pad.replaceChildren(...keys, button("Clear", () => this.put(0)));
    this.here = 0;
  }

  press(event) {
    const { n, here } = this;
    const [row, column] = [Math.floor(here / n), here % n];
    const moves = {
      ArrowLeft: [row, Math.max(0, column - 1)],
      ArrowRight: [row, Math.min(n - 1, column + 1)],
      ArrowUp: [Math.max(0, row - 1), column],
      ArrowDown: [Math.min(n - 1, row + 1), column],
    };
    const cleared = ["0", "Backspace", "Delete"].includes(event.key);
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) {
      const [down, across] = moves[event.key];
      this.stand(down * n + across);
      this.cells[this.here].focus();
    } else if (cleared || (event.key >= "1" && event.key <= `${n}`)) this.put(cleared ? 0 : +event.key);
    else return;
    event.preventDefault();
  }

  stand(at) {
    this.here = at;
    this.cells.forEach((cell, i) => {
      cell.tabIndex = i === at ? 0 : -1;
      cell.classList.toggle("puzzle-here", i === at);
    });
  }

  /** A digit, or 0 for none, into the cell where one stands. */
  put(digit) {
    const board = [...this.board];
    board[this.here] = digit;
    this.fill(board, this.here);
  }

  say(text) {
    this.status.textContent = text;
  }

  // --- the descent ---

  fill(board, here = board.indexOf(0)) {
    this.board = board;
    this.count = solutions(this.n, board).length;
    this.stand(here);
    this.start();
  }

  /** From a random start, or from the one before, and from there step by step. */
  start(first = undefined) {
    if (!this.net) return;
    this.x = this.net.encode(this.board, first);
    this.first = this.x;
    this.net.keyTerm = !this.without.checked;
    this.path = [];
    this.look();
    this.show(0);
    this.play(true);
  }

  look() {
    this.seen = this.net.look(this.x);
    const { attention, memory } = this.seen;
    const E = attention.energy + memory.energy;
    const beliefs = this.net.beliefs(this.x);
    this.path.push({ E, attention: attention.energy, memory: memory.energy, beliefs });
  }

  /** Compute up to step t. */
  reach(t) {
    while (this.path.length <= t) {
      this.x = this.net.step(this.x, this.seen, this.path.length - 1);
      this.look();
    }
  }

  play(on) {
    const until = this.t < 4 * this.depth ? 4 * this.depth : this.last;
    if (on && this.t >= this.last) this.t = 0;
    this.until = on ? until : this.t;
    this.playing = on && !STILL;
    this.player.textContent = this.playing ? "Pause" : "Play";
    if (on && STILL) this.show(until);
    this.shown = performance.now();
    cancelAnimationFrame(this.frame);
    if (this.net) this.next();
  }

  next() {
    this.frame = requestAnimationFrame((now) => this.advance(now));
  }

  /** Every frame some steps are computed ahead, and at most one is shown. */
  advance(now) {
    const began = performance.now();
    while (this.path.length <= this.last && performance.now() - began < 6) this.reach(this.path.length);
    if (this.playing && now - this.shown >= LASTS / (4 * this.depth)) {
      this.shown = now;
      if (this.t + 1 >= this.until) this.play(false);
      this.show(this.t + 1);
    } else this.drawCurve();
    if (this.playing || this.path.length <= this.last) this.next();
  }

  // --- what is shown ---

  show(t) {
    this.reach(t);
    this.t = t;
    this.time.input.value = this.time.said.textContent = t;
    const { n, board } = this;
    const { E, beliefs } = this.path[t];
    const p = (cell) => beliefs.subarray(n * cell, n * cell + n);
    const full = board.map((digit, cell) => digit || best(p(cell)));
    const sure = board.map((digit, cell) => digit || (Math.max(...p(cell)) > 0.5 ? full[cell] : 0));
    const wrong = new Set(conflicts(n, sure).flatMap(({ cells }) => cells));
    this.cells.forEach((cell, at) => this.drawCell(cell, at, p(at), wrong.has(at)));
    this.drawCurve();
    // read out where it stops, not at every step of the way
    this.status.setAttribute("aria-live", this.playing ? "off" : "polite");
    const givens = board.filter(Boolean).length;
    const now = `t = ${t}: E = ${rounded(E)}, ${givens} given${givens === 1 ? "" : "s"}.`;
    this.say(`${now} ${this.verdict(full)}${this.climbed()}`);
  }

  verdict(full) {
    const twice = ({ digit, unit }) => `${unit} has ${digit} twice`;
    const [given] = conflicts(this.n, this.board);
    if (given) return `No solution: ${twice(given)}. Change one of them.`;
    if (!this.count) return "This board has no solution. The model tries all the same.";
    const [found] = conflicts(this.n, full);
    if (!found) return `Solved: every row, column and box holds 1 to ${this.n}.`;
    if (this.t < 4 * this.depth) return "Not solved yet.";
    const many = this.count > 1 ? " Many boards would fit." : "";
    return `Not solved: ${twice(found)}.${many} Try another start.`;
  }

  /** Without the key term the force is not the slope of E. */
  climbed() {
    if (this.net.keyTerm || this.t === 0) return "";
    const E = this.path.slice(0, this.t + 1).map((at) => at.E);
    const up = E.filter((v, i) => i && v - E[i - 1] > 1e-6 * Math.abs(v)).length;
    return ` Without the key term E need not fall: it rose in ${up} of ${this.t} steps.`;
  }

  /** A digit is as dark as it is probable; one that is likely grows and takes the middle. */
  drawCell(cell, at, p, wrong) {
    const { n, board } = this;
    const [height, width] = BOXES[n];
    const given = board[at];
    cell.classList.toggle("puzzle-given", given > 0);
    cell.classList.toggle("puzzle-wrong", wrong);
    [...cell.children].forEach((digit, i) => {
      const dark = given ? +(given === i + 1) : p[i];
      const sure = Math.max(0, 2 * dark - 1);
      const place = (middle) => `${50 + (1 - sure) * (middle - 50)}%`;
      digit.style.left = place((100 * ((i % width) + 0.5)) / width);
      digit.style.top = place((100 * (Math.floor(i / width) + 0.5)) / height);
      digit.style.opacity = dark;
      digit.style.scale = 0.36 + 0.64 * sure;
    });
    const chance = `${Math.round(100 * Math.max(...p))} %`;
    const what = given ? `${given}, given` : `empty, ${best(p)} believed with ${chance}`;
    const where = `Row ${Math.floor(at / n) + 1}, column ${(at % n) + 1}`;
    cell.setAttribute("aria-label", `${where}: ${what}${wrong ? ", in conflict" : ""}`);
  }

  /** E and its two terms, each from where it started. */
  drawCurve() {
    const over = (name) => this.path.map((at) => at[name] - this.path[0][name]);
    const curves = [
      ["E", "text", "#000000", over("E")],
      ["attention", "note", "#0072b2", over("attention")],
      ["memory", "warning", "#d55e00", over("memory")],
    ];
    const range = { t: this.t, last: this.last, low: -1, high: 0 };
    drawCurves(this.curve, "energy, from its start", curves, range);
    const E = this.path.map((at) => at.E.toFixed(2));
    this.curve.setAttribute("aria-label", `Energy at t = 0, 1, …: ${E.join(", ")}`);
  }
}

for (const root of document.querySelectorAll(".et-puzzle")) {
  const board = new Puzzle(root);
  whenSeen(
    root,
    () => board.wake(),
    () => board.path.length && board.drawCurve(),
  );
}
