// The Energy Transformer that looks for odd nodes, as far as a browser needs it: the
// energies of all nodes of one graph, one step downhill, and the probability p.

import { layerNorm, multiply, softplus, transposed } from "./engine.js";

/** −ℓ/β of every query over its neighbors, P of every edge, and both pulls. */
function attendAlong({ start, senders }, Q, K, beta, Y) {
  const energies = new Float32Array(start.length - 1);
  const P = new Float32Array(senders.length);
  const [pullQ, pullK] = [new Float32Array(Q.length), new Float32Array(K.length)];
  for (let c = 0; c < energies.length; c++) {
    let top = -Infinity;
    for (let e = start[c]; e < start[c + 1]; e++) {
      for (let i = 0; i < Y; i++) P[e] += beta * K[senders[e] * Y + i] * Q[c * Y + i];
      if (P[e] > top) top = P[e];
    }
    let sum = 0;
    for (let e = start[c]; e < start[c + 1]; e++) sum += P[e] = Math.exp(P[e] - top);
    if (sum) energies[c] = -(top + Math.log(sum)) / beta; // 0 without neighbors
    for (let e = start[c]; e < start[c + 1]; e++) {
      P[e] /= sum;
      for (let i = 0; i < Y; i++) {
        pullQ[c * Y + i] += P[e] * K[senders[e] * Y + i];
        pullK[senders[e] * Y + i] += P[e] * Q[c * Y + i];
      }
    }
  }
  return { energies, P, pullQ, pullK };
}

export class GraphEnergyTransformer {
  /** The model and its graph: edges by receiver, pixels and labels of the nodes. */
  constructor({ tensors, config }) {
    if (config.relations !== "merged" || config.positions || config.num_heads !== 1)
      throw new Error("expected one head, one kind of edges, and no positions");
    this.config = config;
    this.get = (name) => tensors[name]?.data;
    this.graph = { start: this.get("graph.start"), senders: this.get("graph.senders") };
    this.N = this.graph.start.length - 1;
    this.labels = this.get("graph.labels");
    this.pixels = this.get("graph.pixels");
    const [D, Y] = [config.dim, config.head_dim];
    [this.Wq, this.Wk] = [this.block("attention.Wq"), this.block("attention.Wk")];
    [this.WqT, this.WkT] = [transposed(this.Wq, D, Y), transposed(this.Wk, D, Y)];
    const learned = this.block("attention.log_beta");
    this.beta = learned ? Math.exp(learned[0]) : (config.beta ?? Y ** -0.5);
    this.xiT = transposed(this.block("memory.xi"), config.num_memories, D);
  }

  block(name) {
    return this.get(`params.blocks.0.${name}`);
  }

  /** Rows (N, k) times a matrix (k, n), and a bias. */
  affine(name, rows) {
    const part = (which) => this.get(`params.${name}.${which}`);
    const [kernel, bias] = [part("kernel"), part("bias")];
    const n = bias.length;
    const out = Float32Array.from({ length: this.N * n }, (_, at) => bias[at % n]);
    multiply(out, rows, kernel, this.N, kernel.length / n, n);
    return out;
  }

  /** Tokens at t = 0 (N, D): pixels and log(1 + degree), standardized and encoded. */
  encode() {
    const [mean, std] = [this.get("graph.mean"), this.get("graph.std")];
    const { start } = this.graph;
    const F = mean.length;
    const features = Float32Array.from({ length: this.N * F }, (_, at) => {
      const [n, f] = [Math.floor(at / F), at % F];
      const degree = Math.log1p(start[n + 1] - start[n]);
      return ((f < F - 1 ? this.pixels[n * (F - 1) + f] : degree) - mean[f]) / std[f];
    });
    return this.affine("encoder", features);
  }

  norm(x) {
    const gamma = softplus(this.block("norm.rho")[0]);
    return layerNorm(x, gamma, this.block("norm.delta"), this.config.dim);
  }

  /** E of every node by its attention, −∂E/∂g, and P of every edge. */
  attention(g) {
    const { N, Wq, Wk, WqT, WkT } = this;
    const { dim: D, head_dim: Y } = this.config;
    const [Q, K] = [new Float32Array(N * Y), new Float32Array(N * Y)];
    multiply(Q, g, Wq, N, D, Y);
    multiply(K, g, Wk, N, D, Y);
    const { energies, P, pullQ, pullK } = attendAlong(this.graph, Q, K, this.beta, Y);
    const update = new Float32Array(N * D);
    multiply(update, pullQ, WqT, N, Y, D);
    multiply(update, pullK, WkT, N, Y, D);
    return { energies, update, P };
  }

  /** E of every node by its memories, and −∂E/∂g. */
  memory(g) {
    const { dim: D, num_memories: K } = this.config;
    const hidden = new Float32Array(this.N * K);
    multiply(hidden, g, this.xiT, this.N, D, K);
    const energies = new Float32Array(this.N);
    for (let at = 0; at < hidden.length; at++) {
      hidden[at] = Math.max(0, hidden[at]);
      energies[Math.floor(at / K)] -= hidden[at] ** 2 / 2;
    }
    const update = new Float32Array(this.N * D);
    multiply(update, hidden, this.block("memory.xi"), this.N, K, D);
    return { energies, update };
  }

  /** The probability that a node is anomalous, from g at t = 0 and now. */
  read(first, g) {
    const D = this.config.dim;
    const both = Float32Array.from({ length: 2 * this.N * D }, (_, at) => {
      const [n, i] = [Math.floor(at / (2 * D)), at % (2 * D)];
      return i < D ? first[n * D + i] : g[n * D + i - D];
    });
    const hidden = this.affine("up", both).map((v) => Math.max(0, v));
    const logits = this.affine("down", hidden);
    const p = (_, n) => 1 / (1 + Math.exp(logits[2 * n] - logits[2 * n + 1]));
    return Float32Array.from({ length: this.N }, p);
  }

  /** All nodes at the times 0 … steps; with attention off, without its energy or P. */
  descend(steps, attentive = true) {
    const off = { energies: new Float32Array(this.N), P: null, update: null };
    const path = [];
    let x = this.encode();
    const first = this.norm(x);
    for (let t = 0; t <= steps; t++) {
      const g = this.norm(x);
      const [attention, memory] = [attentive ? this.attention(g) : off, this.memory(g)];
      path.push({ attention, memory, p: this.read(first, g) });
      const update = (at) => memory.update[at] + (attention.update?.[at] ?? 0);
      x = x.map((v, at) => v + this.config.step_size * update(at));
    }
    return path;
  }
}
