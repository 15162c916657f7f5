// node walk.mjs ENGINE MODEL STEPS ATTENTIVE: the descent of a graph, as JSON.
import { readFileSync } from "node:fs";

const [engine, model, steps, attentive] = process.argv.slice(2);
const { readSafetensors } = await import(engine);
const { GraphEnergyTransformer } = await import(new URL("graph.js", `file://${engine}`));
const bytes = readFileSync(model);
const buffer = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
const net = new GraphEnergyTransformer(readSafetensors(buffer));
const list = (a) => a && [...a];
const path = net.descend(+steps, attentive === "true");
console.log(
  JSON.stringify(
    path.map(({ attention, memory, p }) => ({
      attention: list(attention.energies),
      memory: list(memory.energies),
      updates: [list(attention.update), list(memory.update)],
      P: list(attention.P),
      p: list(p),
    })),
  ),
);
