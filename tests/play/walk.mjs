// node walk.mjs ENGINE MODEL STEPS ATTENTIVE: the descent of a graph, as JSON.
import { readFileSync } from "node:fs";

const [engine, model, steps, attentive] = process.argv.slice(2);
const { readSafetensors } = await import(engine);
const { GraphEnergyTransformer } = await import(new URL("graph.js", `file://${engine}`));
const bytes = readFileSync(model);
const buffer = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
const net = new GraphEnergyTransformer(readSafetensors(buffer));
net.descend(2);
const began = performance.now();
const path = net.descend(+steps, attentive === "true");
const took = performance.now() - began;
const list = (a) => a && [...a];
console.log(
  JSON.stringify({
    milliseconds: took / (+steps + 1),
    path: path.map(({ attention, memory, p }) => ({
      attention: list(attention.energies),
      memory: list(memory.energies),
      updates: [list(attention.update), list(memory.update)],
      P: list(attention.P),
      p: list(p),
    })),
  }),
);
