// Texts of a JSON file through a text file in onnxruntime for JavaScript; labels and scores on standard output.
//   node text_in_label_out.mjs FOLDER-WITH-NODE_MODULES PACKAGE model_text.onnx texts.json
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { join } from "node:path";

const [folder, name, model, texts] = process.argv.slice(2);
const require = createRequire(join(folder, "index.js"));
const manifest = JSON.parse(readFileSync(join(folder, "node_modules", name, "package.json"), "utf8"));
const ort = require(name);
if (ort.env?.wasm) ort.env.wasm.numThreads = 1;
const session = await ort.InferenceSession.create(readFileSync(model));
const answers = [];
for (const text of JSON.parse(readFileSync(texts, "utf8"))) {
  const pair = Array.isArray(text) ? text : [text];
  const feeds = { text: new ort.Tensor("string", [pair[0]], [1]) };
  if (pair.length === 2) feeds.text_pair = new ort.Tensor("string", [pair[1]], [1]);
  const found = await session.run(feeds);
  answers.push({ label: found.label?.data[0] ?? "", score: found.score.data[0], logits: Array.from(found.logits.data) });
}
console.log(JSON.stringify({ version: manifest.version, answers }));
