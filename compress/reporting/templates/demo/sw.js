// Keeps the page, the model and the engine in the browser: after one visit the page opens without a network. VERSION and
// FILES stand above: whatever changes in the folder changes this script, and the browser takes all files anew.

const PREFIX = `compress ${registration.scope} `; // other pages of this host have caches of their own
const CACHE = PREFIX + VERSION;

async function keep() {
  const cache = await caches.open(CACHE);
  // asks the host whether each is still the same; then waits until no page runs on the files of before
  await cache.addAll(FILES.map((name) => new Request(name, { cache: "no-cache" })));
}

async function dropOthers() {
  const old = (await caches.keys()).filter((name) => name.startsWith(PREFIX) && name !== CACHE);
  await Promise.all(old.map((name) => caches.delete(name)));
}

async function answer(request) {
  const cache = await caches.open(CACHE);
  return (await cache.match(request, { ignoreSearch: true })) ?? fetch(request);
}

addEventListener("install", (event) => event.waitUntil(keep()));
addEventListener("activate", (event) => event.waitUntil(dropOthers()));
addEventListener("fetch", (event) => event.respondWith(answer(event.request)));
