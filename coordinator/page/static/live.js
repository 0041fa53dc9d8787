"use strict";
// Where the page's data comes from: what is asked for by the address, again whenever the coordinator says that something
// changed. Nothing is ever sent but GET.

(() => {
  const view = document.getElementById("view"), live = document.getElementById("live"), where = document.getElementById("where");
  const verdicts = {};
  let shown = "", busy = false, again = false, timer = 0;

  async function ask(path) {
    const answer = await fetch(path, {credentials: "same-origin"});
    const document = await answer.json().catch(() => ({error: `The coordinator answered ${answer.status}.`}));
    if (!answer.ok || document.error) throw new Error(document.error || `The coordinator answered ${answer.status}.`);
    return document;
  }

  function decoded(text) {
    try { return decodeURIComponent(text); } catch { return text; }  // an address that was typed
  }

  function route() {
    const [, name, ...rest] = location.hash.replace(/^#/, "").split("/").map(decoded);
    return {name: name || "", rest};
  }

  async function overview() {
    const data = await ask("api/overview");
    where.textContent = `${data.job_id} · epoch ${data.epoch}`;
    return data;
  }

  async function build() {
    const {name, rest} = route(), q = encodeURIComponent;
    if (name === "operation") {
      const [op, all] = await Promise.all([ask(`api/operation/${q(rest[0])}`), overview()]);
      op.live = all.running === op.operation_id;
      if (op.live) op.elapsed_s = Math.max(op.elapsed_s, Date.now() / 1000 - op.began_s);
      return {key: op, soon: op.live, parts: () => views.operation(op, true), title: `${op.operation} ${op.snapshot_id}`};
    }
    if (name === "difference") {
      const diff = await ask(`api/difference?before=${q(rest[0])}&after=${q(rest[1])}`);
      return {key: diff, parts: () => views.difference(diff), title: `${rest[0]} to ${rest[1]}`};
    }
    const data = await overview();
    const part = {snapshots: () => views.snapshots(data, verdicts, verify), topology: () => views.topology(data)}[name];
    const what = {snapshots: [data.snapshots, data.invalid, verdicts], topology: data.participants}[name] || data;
    return {key: what, soon: Boolean(data.running), parts: part || (() => views.history(data)), title: {snapshots: "Snapshots", topology: "Topology"}[name] || "History"};
  }

  async function refresh() {
    if (busy) { again = true; return; }
    busy = true;
    clearTimeout(timer);
    const asked = location.hash;
    try {
      const built = await build();
      if (asked === location.hash) {
        const key = asked + JSON.stringify(built.key);
        if (key !== shown) views.show(view, built.parts());
        shown = key;
        document.title = `${built.title} · Safepoint`;
        timer = document.hidden ? 0 : setTimeout(refresh, built.soon ? 500 : 5000);
      } else again = true;
    } catch (error) {
      shown = "";
      views.show(view, [draw.el("p", {class: "card failure"}, error.message === "Failed to fetch" ? "The coordinator does not answer." : error.message)]);
      timer = document.hidden ? 0 : setTimeout(refresh, 2000);
    }
    busy = false;
    for (const link of document.querySelectorAll("nav a")) {
      const here = link.getAttribute("href") === `#/${route().name}` || (link.getAttribute("href") === "#/" && route().name === "operation");
      if (here) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
    }
    if (again) { again = false; refresh(); }
  }

  async function verify(name) {
    verdicts[name] = "reading";
    refresh();
    try { verdicts[name] = await ask(`api/verify/${encodeURIComponent(name)}`); }
    catch (error) { verdicts[name] = {error: error.message}; }
    refresh();
  }

  // A browser has six connections to a place, for all of its tabs: one that nobody looks at gives its own back.
  let source = null, version = "";

  function listen() {
    if (document.hidden || source) return;
    source = new EventSource("events");
    source.onopen = () => { live.textContent = "live"; live.className = "on"; };
    source.onerror = () => { live.textContent = "not connected"; live.className = "off"; };
    source.onmessage = (event) => {
      if (event.data === version) return;
      version = event.data;
      refresh();
    };
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) { listen(); refresh(); return; }
    if (source) source.close();
    source = null;
    clearTimeout(timer);
  });
  if (location.search) window.history.replaceState(null, "", location.pathname + location.hash);
  window.addEventListener("hashchange", () => { refresh().then(() => view.focus({preventScroll: true})); window.scrollTo(0, 0); });
  refresh();
  listen();
})();
