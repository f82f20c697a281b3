// Search in an index that is a script (a page from the disk may fetch nothing), and copy buttons.
"use strict";
const base = document.currentScript.dataset.base.replace(/\/?$/, "/");
const query = document.getElementById("query");
const found = document.getElementById("found");
const SHOWN = 12;
let loading = null;

function load() {
  loading ??= new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = base + "assets/index.js";
    script.onload = () => done(window.INDEX.map(prepare));
    script.onerror = failed;
    document.head.append(script);
  });
  return loading;
}

function words(text) {
  return text.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];
}

function prepare([place, page, title, text]) {
  return { place, page, title, text, named: words(page + " " + title), titled: words(title), body: words(text) };
}

// How well a part answers: every word must be in it; one in a title counts more, so does a whole word.
function score(part, asked) {
  let sum = 0;
  for (const word of asked) {
    let best = 0;
    for (const one of part.named) if (one.startsWith(word)) best = Math.max(best, one === word ? 12 : 8);
    for (const one of part.titled) if (one.startsWith(word)) best = Math.max(best, one === word ? 20 : 12);
    let times = 0;
    for (const one of part.body) if (one.startsWith(word)) times += one === word ? 1 : 0.5;
    if (!best && !times) return 0;
    sum += best + (4 * times) / (times + 3);
  }
  return sum;
}

function search(parts, text) {
  const asked = words(text);
  if (!asked.length) return [];
  return parts
    .map((part) => ({ part, score: score(part, asked) }))
    .filter((one) => one.score > 0)
    .sort((one, other) => other.score - one.score)
    .slice(0, SHOWN)
    .map((one) => one.part);
}

// The words around the first that was asked for, with all of them marked.
function excerpt(text, asked) {
  const small = document.createElement("small");
  const lower = text.toLowerCase();
  const places = asked.map((word) => lower.indexOf(word)).filter((at) => at >= 0);
  const start = Math.max(0, Math.min(...places, text.length) - 60);
  const from = start && places.length ? text.indexOf(" ", start) + 1 : 0;
  for (const piece of text.slice(from, from + 170).split(/([\p{L}\p{N}]+)/u)) {
    const hit = asked.some((word) => piece.toLowerCase().startsWith(word));
    const node = hit ? document.createElement("mark") : document.createTextNode(piece);
    if (hit) node.textContent = piece;
    small.append(node);
  }
  return small;
}

function show(parts, text) {
  const asked = words(text);
  found.hidden = !asked.length;
  found.replaceChildren(
    ...parts.map((part) => {
      const item = document.createElement("li");
      const link = document.createElement("a");
      const title = document.createElement("b");
      link.href = base + part.place;
      title.textContent = part.title && part.title !== part.page ? `${part.page}: ${part.title}` : part.page;
      link.append(title, excerpt(part.text, asked));
      item.append(link);
      return item;
    }),
  );
  if (!parts.length && asked.length) {
    const none = document.createElement("p");
    none.textContent = "No page has all of these words.";
    found.append(none);
  }
}

query.addEventListener("focus", load);
query.addEventListener("input", async () => {
  const text = query.value;
  const parts = await load();
  if (query.value === text) show(search(parts, text), text);
});
document.addEventListener("keydown", (event) => {
  const links = [...found.querySelectorAll("a")];
  const at = links.indexOf(document.activeElement);
  const typing = /INPUT|TEXTAREA/.test(document.activeElement.tagName);
  if (event.key === "/" && !typing) query.focus();
  else if (event.key === "Escape") found.hidden = true;
  else if (event.key === "ArrowDown" && (at >= 0 || document.activeElement === query)) links[at + 1]?.focus();
  else if (event.key === "ArrowUp" && at >= 0) (links[at - 1] ?? query).focus();
  else if (event.key === "Enter" && document.activeElement === query && links.length) links[0].click();
  else return;
  event.preventDefault();
});
document.addEventListener("click", (event) => {
  if (!event.target.closest(".find") || event.target.closest("#found a")) found.hidden = true;
});

for (const block of document.querySelectorAll(".highlight")) {
  const code = block.querySelector("pre code");
  if (!code || !navigator.clipboard) continue;
  const button = document.createElement("button");
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(code.textContent.replace(/\n$/, ""));
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  block.prepend(button);
}
