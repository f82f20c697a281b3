// Answers what is typed with the model beside this script, whose graph reads the text itself. Asks no other server.

import * as ort from "./ort.wasm.min.mjs";

const PAUSE = 120; // milliseconds without a key before a text is answered
const HEARD = 700; // ... before the answer is read out: not every key's
const SHOWN = 5; // labels, or texts, that are listed

const at = (id) => document.getElementById(id);
const boxes = [...document.querySelectorAll("textarea.text")];
const lines = at("lines"); // where texts are compared; else null
const vectors = new Map(); // of the lines

let about; // demo.json
let session;
let busy = true; // until the model is open; what is typed meanwhile is answered then
let again = false; // something was typed while the model ran
let pause, heard;

const percent = (share) => (share < 0.0005 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`);
const number = (value) => value.toFixed(3).replace("-", "−");

// -- the model

async function open() {
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.proxy = true; // in a worker: a slow model does not hold up the keys
  ort.env.wasm.wasmPaths = new URL("./", import.meta.url).href;
  about = await (await fetch("demo.json")).json();
  session = await ort.InferenceSession.create("model_text.onnx", { extra: about.entries, logSeverityLevel: 4 });
}

async function run(texts) {
  const feeds = Object.fromEntries(
    texts.map((text, n) => [["text", "text_pair"][n], new ort.Tensor("string", [text.replaceAll("\0", " ")], [1])]),
  );
  const start = performance.now();
  const outputs = await session.run(feeds);
  return { ms: performance.now() - start, ...outputs };
}

// -- what its answers look like: the answer itself, a figure beside it, and a list of [name, figure, share of a bar]; by the form of the answer

const ranked = (scores) => about.labels.map((label, n) => [label, scores[n]]).sort((one, other) => other[1] - one[1]);
const listed = (scores) => scores.map(([label, share]) => [label, percent(share), share]);

const SHOW = {
  label({ probabilities }) {
    const scores = ranked(probabilities.data);
    return { label: scores[0][0], figure: percent(scores[0][1]), list: listed(scores) };
  },
  labels({ label, probabilities }) {
    const scores = ranked(probabilities.data);
    const likely = scores.map(([name]) => name).filter((name) => label.data.includes(name));
    return { label: likely.join(", ") || "none of its labels", figure: "", list: listed(scores) };
  },
  number: ({ score }) => ({ label: number(score.data[0]), figure: "", list: [] }),
  words(outputs, [text]) {
    const found = entities(text, outputs);
    const list = found.map(({ name, words, share }) => [`${name}: ${words}`, percent(share)]);
    return { label: list.map(([words]) => words).join(", ") || "nothing marked", figure: "", list, marked: marked(text, found) };
  },
  span({ answer, score }, [, context]) {
    const characters = [...context];
    let [start, end] = [...answer.data].map(Number);
    while (start < end && /^\p{M}$/u.test(characters[end])) end += 1; // accents that the tokenizer drops
    const found = characters.slice(start, end).join("").trim();
    return { label: found || "no answer in this text", figure: percent(score.data[0]), list: [] };
  },
  async vector({ sentence_embedding: vector }) {
    const others = [...new Set(lines.value.split("\n").map((line) => line.trim()))].filter(Boolean);
    const cosines = [];
    for (const line of others) cosines.push([line, cosine(vector.data, await vectorOf(line))]);
    cosines.sort((one, other) => other[1] - one[1]);
    const list = cosines.map(([line, value]) => [line, number(value), Math.max(0, value)]);
    return list.length ? { label: list[0][0], figure: list[0][1], list } : { label: "no text to compare it with", figure: "", list };
  },
};

// The entities of the words that have a label, as of IOB2 or BIOES: what is between two of their words is white space.
// Places count characters, not JavaScript's UTF-16 units.
function entities(text, { label, score, words }) {
  const characters = [...text];
  const found = [];
  let open = null;
  label.data.forEach((tag, n) => {
    if (!tag) return;
    const [start, end] = [words.data[2 * n], words.data[2 * n + 1]].map(Number);
    const [, prefix, name] = /^([BIESLU])-(.+)$/s.exec(tag) ?? [null, tag === "O" ? "O" : "S", tag];
    const apart = open && characters.slice(open.end, start).join("").trim();
    if (open && (apart || "BSU".includes(prefix) || name !== open.name)) open = null;
    if (prefix === "O") return;
    if (!open) found.push((open = { name, start, end, shares: [] }));
    open.end = end;
    open.shares.push(score.data[n]);
    if ("ESLU".includes(prefix)) open = null;
  });
  return found.map(({ shares, ...each }) => ({
    ...each,
    words: characters.slice(each.start, each.end).join(""),
    share: shares.reduce((sum, one) => sum + one, 0) / shares.length,
  }));
}

function marked(text, found) {
  const characters = [...text];
  const parts = [];
  let at = 0;
  for (const { name, start, end, words } of found) {
    const part = Object.assign(document.createElement("mark"), { textContent: words });
    part.append(" ", Object.assign(document.createElement("small"), { textContent: name }));
    parts.push(characters.slice(at, start).join(""), part);
    at = end;
  }
  return [...parts, characters.slice(at).join("")];
}

async function vectorOf(line) {
  if (!vectors.has(line)) vectors.set(line, (await run([about.prompts[1] + line])).sentence_embedding.data);
  return vectors.get(line);
}

function cosine(one, other) {
  let [product, ones, others] = [0, 0, 0];
  one.forEach((value, n) => {
    product += value * other[n];
    ones += value * value;
    others += other[n] * other[n];
  });
  return product / Math.sqrt(ones * others || 1);
}

// -- the page

function say(words, kind, figure = "") {
  at("label").replaceChildren(...[words].flat());
  at("label").className = kind;
  at("score").textContent = figure;
}

function drawn([name, figure, share]) {
  const item = document.createElement("li");
  for (const text of [name, figure]) item.append(Object.assign(document.createElement("span"), { textContent: text }));
  if (share === undefined) return item;
  const bar = document.createElement("span");
  bar.className = "bar";
  bar.append(document.createElement("i"));
  bar.firstChild.style.width = `${100 * share}%`;
  item.append(bar);
  return item;
}

async function answer() {
  if (busy) return void (again = true);
  busy = true;
  try {
    do {
      again = false;
      if (boxes.some((box) => !box.value.trim())) clear();
      else await ask(boxes.map((box) => about.prompts[0] + box.value));
    } while (again);
  } catch (error) {
    fail(error);
  }
  busy = false;
}

async function ask(texts) {
  const outputs = await run(texts);
  const { label, figure, list, marked } = await SHOW[about.form](outputs, texts);
  const rest = list.length - SHOWN;
  say(marked ?? label, marked ? "marked" : "", figure);
  at("ms").textContent = `${outputs.ms < 10 ? outputs.ms.toFixed(1) : Math.round(outputs.ms)} ms`;
  at("scores").replaceChildren(...list.slice(0, SHOWN).map(drawn));
  if (rest > 0) {
    const more = drawn([`and ${rest} more`, ""]);
    more.className = "rest";
    at("scores").append(more);
  }
  clearTimeout(heard);
  heard = setTimeout(() => (at("status").textContent = `${label} ${figure}`), HEARD);
}

function clear() {
  clearTimeout(heard);
  say(boxes.length > 1 ? "Type both texts." : "Type a text.", "muted");
  at("ms").textContent = "—";
  at("scores").replaceChildren();
  at("status").textContent = "";
}

function fail(error) {
  say(`This browser cannot run the model: ${error?.message ?? error}`, "warn");
  at("status").textContent = at("label").textContent;
}

async function start() {
  for (const box of document.querySelectorAll("textarea")) {
    box.addEventListener("input", () => {
      clearTimeout(pause);
      pause = setTimeout(answer, PAUSE);
    });
  }
  await open();
  for (const button of document.querySelectorAll("[data-example]")) {
    button.addEventListener("click", () => {
      about.examples[button.dataset.example].forEach((text, n) => (boxes[n].value = text));
      answer();
    });
    button.disabled = false;
  }
  await run(boxes.map(() => "a")); // the first answer takes longer than others
  at("late").remove();
  busy = false;
  await answer();
  // `compress demo --serve` has another address each time: what a browser kept of it would never be used again
  if (location.hostname !== "127.0.0.1") navigator.serviceWorker?.register("sw.js").catch(console.warn);
}

start().catch(fail);
