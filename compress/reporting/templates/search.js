"use strict";
// A trial that is pointed at, tapped, or best within the budget is told beside the picture, with what gets its bundle.
const panel = document.getElementById("chosen"), table = document.getElementById("trials");
if (panel && table) {
  const trials = Array.from(table.tBodies[0].rows, (row) => ({
    row, number: row.dataset.n, values: row.dataset.v.split(" ").map(Number), front: row.classList.contains("front"), within: row.className !== "",
  }));
  const views = [...document.querySelectorAll(".view")], code = panel.querySelector("code"), copy = panel.querySelector(".copy");
  const box = panel.querySelector(".budget-box"), slider = box.querySelector("input"), said = box.querySelector("output");
  const shown = () => views.find((view) => view.offsetParent !== null) || views[0];
  const costOf = (view) => Number(view.dataset.cost);
  const scale = (words) => {
    const [low, high, start, end, log] = words.split(" ").map(Number), f = log ? Math.log : (value) => value;
    return (value) => start + ((f(value) - f(low)) / (f(high) - f(low))) * (end - start);
  };
  const pictures = views.flatMap((view) => [...view.querySelectorAll("svg.picture")].map((svg) => {
    const field = svg.querySelector("g[data-cost]"), x = scale(field.dataset.x), y = scale(field.dataset.y);
    const bottom = Number(field.dataset.y.split(" ")[2]), cost = costOf(view);
    const ring = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "circle"));
    ring.setAttribute("class", "ring");
    ring.setAttribute("r", "0");
    const places = trials.filter((one) => Number.isFinite(one.values[0]) && one.values[cost] > 0)
      .map((one) => ({ one, x: x(one.values[cost]), y: Math.min(y(one.values[0]), bottom) }));
    return { svg, ring, places };
  }));
  let pinned = trials.find((one) => one.number === panel.querySelector(".of-number").textContent);
  const tell = (one) => {
    panel.querySelector(".of-number").textContent = one.number;
    const cells = [...one.row.cells].slice(1);
    panel.querySelectorAll(".told dd").forEach((place, index) => { place.textContent = cells[index].textContent; });
    code.textContent = `${code.dataset.before}${one.number} --bundle student-${one.number}`;
    copy.textContent = "Copy";
    for (const { ring, places } of pictures) {
      const at = places.find((place) => place.one === one);
      ring.setAttribute("r", at ? "10" : "0");
      if (at) { ring.setAttribute("cx", at.x); ring.setAttribute("cy", at.y); }
    }
  };
  const pin = (one) => { pinned = one; tell(one); };
  const nearest = ({ svg, places }, event) => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    let best = null, least = event.pointerType === "touch" ? 40 : 24;
    for (const place of places) {
      // What is on the front is easier to hit than the crowd around it.
      const far = Math.hypot(place.x - point.x, place.y - point.y) * (place.one.front ? 0.5 : 1);
      if (far < least) { best = place.one; least = far; }
    }
    return best;
  };
  for (const picture of pictures) {
    picture.svg.addEventListener("pointermove", (event) => tell(nearest(picture, event) || pinned));
    picture.svg.addEventListener("pointerleave", () => tell(pinned));
    picture.svg.addEventListener("click", (event) => { const one = nearest(picture, event); if (one) pin(one); });
  }
  table.addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-n]"), one = trials.find((each) => each.row === row);
    if (one) { pin(one); panel.scrollIntoView({ block: "nearest" }); }
  });
  for (const row of document.querySelectorAll(".numbered tr[data-n]")) {
    row.addEventListener("click", () => pin(trials.find((one) => one.number === row.dataset.n)));
  }
  // The front by the cost that shows: each step scores more than all that cost less.
  const steps = () => {
    const cost = costOf(shown()), known = trials.filter((one) => one.within && one.values[cost] > 0);
    known.sort((one, other) => one.values[cost] - other.values[cost] || other.values[0] - one.values[0]);
    let best = -Infinity;
    return known.filter((one) => { const more = one.values[0] > best; best = Math.max(best, one.values[0]); return more; });
  };
  const budget = () => {
    const best = steps()[Number(slider.value)], most = best.values[costOf(shown())], unit = shown().querySelector("h3").textContent.toLowerCase();
    const [size, name] = [[1e9, " G"], [1e6, " M"], [1e4, " k"]].find(([size]) => most >= size) ?? [1, ""];
    const written = `${Number((most / size).toPrecision(3))}${name}`;
    said.textContent = `Up to ${written} of ${unit}: trial ${best.number}, ${best.row.cells[1].textContent}`;
    slider.setAttribute("aria-valuetext", said.textContent);
    pin(best);
  };
  const ready = () => {
    const found = steps();
    box.hidden = found.length < 2;
    slider.max = String(Math.max(0, found.length - 1));
    const at = found.indexOf(pinned);
    slider.value = String(at < 0 ? found.length - 1 : at);
  };
  slider.addEventListener("input", budget);
  for (const control of document.querySelectorAll(".controls input")) control.addEventListener("change", ready);
  copy.hidden = false;
  copy.addEventListener("click", async () => {
    getSelection().selectAllChildren(code);
    try {
      await navigator.clipboard.writeText(code.textContent);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = document.execCommand("copy") ? "Copied" : "Selected: copy it with the keyboard";
    }
  });
  ready();
  if (pinned) tell(pinned);
}
