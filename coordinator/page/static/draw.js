"use strict";
// The figures, as SVG. They know nothing of where data comes from: the page and a report draw alike.
// Everything that is shown is set as text, never as markup.

const draw = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const ROLES = ["policy_model", "engine", "agent", "resources", "auxiliary_model"];
  const COUNTS = [["in_flight", "in flight"], ["held", "held"], ["parked", "parked"]];

  function el(name, attributes, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      made.setAttribute(key, value === true ? "" : String(value));
    }
    for (const child of children.flat(Infinity)) {
      if (child !== null && child !== undefined && child !== "") made.append(child);
    }
    return made;
  }

  function svg(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, String(value));
    if (text !== undefined) made.textContent = text;
    return made;
  }

  // ---- numbers --------------------------------------------------------------------------------------------------

  function seconds(value) {
    if (value === null || value === undefined) return "";
    if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
    if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
    return value < 7200 ? `${(value / 60).toFixed(1)} min` : `${(value / 3600).toFixed(1)} h`;
  }

  function bytes(value) {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let unit = 0;
    while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
    return `${unit ? value.toFixed(value < 10 ? 1 : 0) : value} ${units[unit]}`;
  }

  function percent(share) {
    return share === null || share === undefined ? "" : `${Math.floor(share * 1000) / 10} %`;
  }

  function words(name) { return String(name || "").replaceAll("_", " "); }

  function step(span, wanted) {
    const raw = span / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(raw));
    return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  }

  // ---- the tip --------------------------------------------------------------------------------------------------

  let tip = null;

  function showTip(target, rows, at) {
    hideTip();
    tip = el("div", {class: "tip", role: "tooltip"}, rows.filter(Boolean).map((row, number) =>
      el("div", {class: number ? "" : "first"}, row)));
    document.body.append(tip);
    const box = target.getBoundingClientRect();
    const x = at === undefined ? box.left + Math.min(box.width, 200) / 2 : at;
    const left = Math.min(Math.max(8, x - tip.offsetWidth / 2), document.documentElement.clientWidth - tip.offsetWidth - 8);
    const above = box.top - tip.offsetHeight - 8;
    tip.style.left = `${left + window.scrollX}px`;
    tip.style.top = `${(above < 4 ? box.bottom + 8 : above) + window.scrollY}px`;
  }

  function hideTip() {
    if (tip) tip.remove();
    tip = null;
  }

  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

  function tells(target, key, label, rows) {
    target.setAttribute("tabindex", "0");
    target.setAttribute("role", "img");
    target.setAttribute("aria-label", label);
    target.dataset.key = key;
    target.addEventListener("mouseenter", () => showTip(target, rows()));
    target.addEventListener("focus", () => showTip(target, rows()));
    target.addEventListener("mouseleave", hideTip);
    target.addEventListener("blur", hideTip);
    return target;
  }

  // ---- one operation over time ----------------------------------------------------------------------------------

  // `range`: [from, to] in seconds, or null for the whole of it.
  function timeline(width, op, range) {
    const running = !op.outcome && op.live, end = Math.max(op.elapsed_s, 0.001);
    const [from, to] = range || [0, end * 1.01];
    const narrow = width < 620, left = narrow ? 10 : 168, right = 14;
    const inner = width - left - right;
    const x = (at) => left + (Math.min(Math.max(at, from), to) - from) / (to - from) * inner;
    const top = 26, phaseHeight = 24, head = narrow ? 20 : 0, barHeight = 14, curveHeight = 32, gap = 12;
    // Who is never called, as a judge is, has nothing to show here.
    const lanes = op.lanes.filter((lane) => lane.bars.length || lane.points.length);
    const tall = (lane) => head + barHeight + (curved(lane) ? 4 + curveHeight : narrow ? 0 : 16) + gap;
    const height = top + phaseHeight + 14 + lanes.reduce((sum, lane) => sum + tall(lane), 0);
    const root = svg("svg", {width, height, viewBox: `0 0 ${width} ${height}`, class: "timeline", role: "group",
      "aria-label": `Timeline of ${op.operation} ${op.operation_id}`});

    if (op.pause && op.pause.to_s > from && op.pause.from_s < to) {
      const a = x(op.pause.from_s), b = x(op.pause.to_s);
      root.append(svg("rect", {x: a, y: top, width: Math.max(2, b - a), height: height - top, class: "pause"}));
    }
    const size = step(to - from, inner / 90);
    for (let at = Math.ceil(from / size) * size; at <= to + size / 1e6; at += size) {
      root.append(svg("line", {x1: x(at), x2: x(at), y1: top, y2: height, class: "grid"}));
      const label = svg("text", {x: x(at), y: 16, class: "axis", "text-anchor": x(at) > width - 40 ? "end" : x(at) < left + 20 && narrow ? "start" : "middle"},
        Math.abs(at) < size / 1e3 ? "0" : seconds(Math.round(at / size) * size + size / 1e6).replace(/\.0+ /, " "));
      root.append(label);
    }
    const visible = (bar) => (bar.to_s ?? end) >= from && bar.from_s <= to;
    const place = (bar) => {
      const a = x(bar.from_s), b = x(bar.to_s ?? end);
      return {x: a, width: Math.max(3, b - a)};
    };

    op.phases.filter(visible).forEach((phase, number) => {
      const where = place(phase), name = words(phase.phase);
      const open = phase.to_s === null, failed = !phase.done && !(open && running);
      const bar = svg("rect", {...where, y: top, height: phaseHeight - 4, rx: 4,
        class: `bar ${phase.phase}${failed ? " failed" : ""}${open && running ? " open" : ""}`});
      const took = (phase.to_s ?? end) - phase.from_s;
      root.append(tells(bar, `phase ${number}`, `${name}, ${seconds(took)}${failed ? ", not finished" : ""}`, () => [
        name, `${seconds(took)}, from ${seconds(phase.from_s)}`,
        phase.budget_s === null ? "" : `budget ${seconds(phase.budget_s)}`,
        failed ? "it did not finish" : open && running ? "it runs" : ""]));
      if (where.width > name.length * 7.5 + 10) {
        root.append(svg("text", {x: where.x + where.width / 2, y: top + 14, class: "inbar", "text-anchor": "middle"}, name));
      }
    });
    if (!narrow) root.append(svg("text", {x: 0, y: top + 14, class: "lane"}, "phases"));

    let y = top + phaseHeight + 14;
    lanes.forEach((lane, number) => {
      root.append(svg("line", {x1: 0, x2: width, y1: y - 6, y2: y - 6, class: "rule"}));
      const blamed = op.failure && op.failure.participant_id === lane.participant_id;
      const label = lane.participant_id.length > 22 && !narrow ? `${lane.participant_id.slice(0, 20)}…` : lane.participant_id;
      root.append(svg("text", {x: narrow ? left : 0, y: y + 11, class: blamed ? "lane blamed" : "lane"}, label));
      const role = svg("text", {x: narrow ? width - right : 0, y: narrow ? y + 11 : y + 27, class: "quiet",
        "text-anchor": narrow ? "end" : "start"}, [words(lane.role), peak(lane) ? `up to ${peak(lane)}` : ""].filter(Boolean).join(", "));
      root.append(role);
      const barY = y + head, curveY = barY + barHeight + 4;
      curve(root, lane, x, curveY, curveHeight, from, to, end, left, inner, number);
      lane.bars.filter(visible).forEach((bar, index) => {
        const where = place(bar), open = bar.to_s === null, failed = !bar.done && !(open && running);
        const took = (bar.to_s ?? end) - bar.from_s, name = words(bar.phase);
        const drawn = svg("rect", {...where, y: barY, height: barHeight, rx: 3,
          class: `bar ${bar.phase}${failed ? " failed" : ""}${open && running ? " open" : ""}`});
        root.append(tells(drawn, `bar ${number} ${index}`,
          `${lane.participant_id}, ${name}, ${seconds(took)}${failed ? ", not finished" : ""}`,
          () => [`${lane.participant_id}: ${name}`, `${seconds(took)}, from ${seconds(bar.from_s)}`, ...lastWord(lane, bar),
            failed ? "it did not finish" : ""]));
      });
      y += tall(lane);
    });

    op.marks.filter((mark) => mark.at_s >= from && mark.at_s <= to && mark.kind !== "resumed").forEach((mark, number) => {
      const at = x(mark.at_s);
      const sign = svg("path", {d: `M${at - 5} ${top - 7}h10l-5 7z`, class: `mark ${mark.kind}`});
      root.append(tells(sign, `mark ${number}`, `${mark.kind}: ${mark.text}`, () => [
        `${mark.kind} at ${seconds(mark.at_s)}`, mark.participant_id, mark.text]));
    });
    return root;
  }

  function lastWord(lane, bar) {
    const within = lane.points.filter((p) => p.phase === bar.phase && p.at_s >= bar.from_s && p.at_s <= (bar.to_s ?? Infinity));
    return within.length ? said(within[within.length - 1]) : [];
  }

  function said(point) {
    const counts = COUNTS.filter(([key]) => point[key]).map(([key, name]) => `${point[key]} ${name}`);
    const size = point.bytes_done ? [`${bytes(point.bytes_done)}${point.bytes_total ? ` of ${bytes(point.bytes_total)}` : ""}`] : [];
    const items = point.items_done ? [`${point.items_done}${point.items_total ? ` of ${point.items_total}` : ""} items`] : [];
    const rest = point.waiting_count - point.waiting.length;
    return [[...counts, ...size, ...items].join(", "), ...point.waiting.map((who) => `waits for ${who}`),
      rest > 0 && point.waiting.length ? `and ${rest} more` : ""];
  }

  function peak(lane) {
    return Math.max(0, ...lane.points.map((p) => p.in_flight + p.held + p.parked));
  }

  function curved(lane) {
    return peak(lane) > 0 || lane.points.filter(sized).length > 1;
  }

  function sized(point) { return point.bytes_total || point.items_total; }

  function curve(root, lane, x, y, height, from, to, end, left, inner, number) {
    const points = lane.points;
    const most = peak(lane);
    if (!curved(lane)) return;
    // A count holds until the next one, and no longer than the phase in which it was told.
    const until = points.map((p, i) => {
      const bar = lane.bars.find((b) => b.phase === p.phase && b.from_s <= p.at_s && p.at_s <= (b.to_s ?? end));
      return Math.min(points[i + 1] ? points[i + 1].at_s : Infinity, bar ? bar.to_s ?? end : end);
    });
    const base = y + height, scale = most ? height / most : 0;
    let below = points.map(() => 0);
    for (const [key] of COUNTS) {
      const upper = points.map((p, i) => below[i] + p[key]);
      const d = points.map((p, i) => {
        const a = x(p.at_s), b = Math.max(a + 0.5, x(until[i]));
        return p[key] ? `M${a} ${base - below[i] * scale}V${base - upper[i] * scale}H${b}V${base - below[i] * scale}z` : "";
      }).join("");
      if (d) root.append(svg("path", {d, class: `area ${key}`}));
      below = upper;
    }
    const exported = points.filter(sized);
    if (exported.length > 1) {
      const share = (p) => Math.min(1, p.bytes_total ? p.bytes_done / p.bytes_total : p.items_done / p.items_total);
      root.append(svg("path", {class: "export", d: exported.map((p, i) =>
        `${i ? "L" : "M"}${x(p.at_s)} ${base - share(p) * height}`).join("")}));
    }
    const reach = svg("rect", {x: left, y, width: inner, height, class: "reach"});
    let chosen = points.length - 1;
    const show = (index) => {
      chosen = index;
      showTip(reach, [`${lane.participant_id} at ${seconds(points[index].at_s)}`, ...said(points[index])],
        root.getBoundingClientRect().left + x(points[index].at_s));
    };
    reach.addEventListener("mousemove", (event) => {
      const at = from + (event.clientX - root.getBoundingClientRect().left - left) / inner * (to - from);
      let index = points.findIndex((p) => p.at_s > at);
      index = index === -1 ? points.length - 1 : Math.max(0, index - 1);
      if (index !== chosen || !tip) show(index);
    });
    reach.addEventListener("mouseleave", hideTip);
    reach.addEventListener("blur", hideTip);
    reach.addEventListener("focus", () => show(chosen));
    reach.addEventListener("keydown", (event) => {
      const move = {ArrowLeft: -1, ArrowRight: 1, Home: -points.length, End: points.length}[event.key];
      if (!move) return;
      event.preventDefault();
      show(Math.min(points.length - 1, Math.max(0, chosen + move)));
    });
    reach.setAttribute("tabindex", "0");
    reach.setAttribute("role", "img");
    reach.dataset.key = `curve ${number}`;
    reach.setAttribute("aria-label", `${lane.participant_id}: over time${most ? `, up to ${most}` : ""}; arrow keys move`);
    root.append(reach);
  }

  // ---- pauses of many operations --------------------------------------------------------------------------------

  function pauses(width, operations) {
    const shown = operations.filter((op) => op.pause_s !== null || op.outcome === "aborted").slice(0, 60).reverse();
    const height = 96, bottom = 18, top = 16;
    const root = svg("svg", {width, height, viewBox: `0 0 ${width} ${height}`, class: "pauses", role: "group",
      "aria-label": "Pause of each operation, oldest first"});
    const most = Math.max(0.001, ...shown.map((op) => op.pause_s || 0));
    const wide = Math.min(34, (width - 4) / Math.max(1, shown.length));
    root.append(svg("line", {x1: 0, x2: width, y1: height - bottom, y2: height - bottom, class: "rule"}));
    root.append(svg("text", {x: 0, y: 11, class: "quiet"}, `pause, up to ${seconds(most)}`));
    root.append(svg("text", {x: 0, y: height - 4, class: "quiet"}, "older"));
    if (shown.length) {
      root.append(svg("text", {x: Math.min(width, shown.length * wide), y: height - 4, class: "quiet", "text-anchor": "end"}, shown.length > 3 ? "newest" : ""));
    }
    shown.forEach((op, number) => {
      const tall = Math.max(3, (op.pause_s || 0) / most * (height - bottom - top));
      const bar = svg("rect", {x: number * wide + 1, y: height - bottom - tall, width: Math.max(2, wide - 3), height: tall, rx: 2,
        class: `bar ${op.outcome === "succeeded" || !op.outcome ? (op.operation === "save" ? "saved" : "restore") : "abort"}`});
      root.append(tells(bar, `pause ${number}`, `${op.operation} ${op.snapshot_id}: ${op.outcome || "runs"}, paused ${seconds(op.pause_s)}`,
        () => [`${op.operation} ${op.snapshot_id}`, op.pause_s === null ? op.cause || words(op.outcome) : `paused ${seconds(op.pause_s)}`, words(op.outcome)]));
    });
    return root;
  }

  // ---- who takes part -------------------------------------------------------------------------------------------

  // Callers stand left of those that they call; on a narrow page above them, and each says whom it calls.
  function topology(width, people) {
    const layers = [["agent"], ["policy_model", "resources"], ["engine", "auxiliary_model"]]
      .map((roles) => people.filter((p) => roles.includes(p.role)).sort((a, b) =>
        roles.indexOf(a.role) - roles.indexOf(b.role) || (a.participant_id < b.participant_id ? -1 : 1)))
      .concat([people.filter((p) => !ROLES.includes(p.role))]).filter((layer) => layer.length);
    const narrow = width < 620, tall = narrow ? 78 : 64, gapY = 18;
    const across = narrow ? Math.max(1, Math.floor((width + 10) / 165)) : 1;
    const wide = narrow ? Math.min(240, (width - (across - 1) * 10) / across) : Math.min(230, (width - 60 * (layers.length - 1)) / layers.length);
    const spots = new Map();
    let height = 8;
    if (narrow) {
      for (const layer of layers) {
        layer.forEach((p, i) => spots.set(p.participant_id, {x: (i % across) * (wide + 10), y: height + Math.floor(i / across) * (tall + 10), p}));
        height += Math.ceil(layer.length / across) * (tall + 10) + 26;
      }
    } else {
      const most = Math.max(1, ...layers.map((layer) => layer.length));
      height = most * (tall + gapY) + 8;
      const space = layers.length > 1 ? (width - wide * layers.length) / (layers.length - 1) : 0;
      layers.forEach((layer, column) => layer.forEach((p, i) => spots.set(p.participant_id,
        {x: column * (wide + Math.min(space, 200)), y: (height - layer.length * (tall + gapY)) / 2 + i * (tall + gapY) + gapY / 2, column, p})));
    }
    const root = svg("svg", {width, height, viewBox: `0 0 ${width} ${height}`, class: "topology", role: "group", "aria-label": "Who takes part, and who calls whom"});
    for (const from of spots.values()) {
      const {x, y, p} = from;
      for (const name of p.depends_on) {
        const to = spots.get(name);
        if (!to || narrow) continue;  // where there is no room for lines, the box says whom it calls
        const a = [x + wide, y + tall / 2], b = [to.x, to.y + tall / 2];
        const between = to.column - from.column !== 2 ? null : passage(layers[from.column + 1].length, height, tall + gapY, (a[1] + b[1]) / 2);
        const middle = between === null ? null : [...spots.values()].find((spot) => spot.column === from.column + 1).x;
        const bend = middle !== null ? `C${a[0] + 40} ${a[1]} ${middle - 50} ${between} ${middle - 8} ${between}L${middle + wide + 8} ${between}C${middle + wide + 50} ${between} ${b[0] - 40} ${b[1]}` : `C${a[0] + 40} ${a[1]} ${b[0] - 40} ${b[1]}`;
        root.append(svg("path", {d: `M${a[0]} ${a[1]}${bend} ${b[0]} ${b[1]}`, class: "edge"}));
        root.append(svg("circle", {cx: b[0], cy: b[1], r: 3.5, class: "end"}));
      }
    }
    for (const {x, y, p} of spots.values()) {
      const box = svg("rect", {x: x + 0.5, y: y + 0.5, width: wide - 1, height: tall - 1, rx: 8, class: `node ${p.role}${p.missing ? " missing" : ""}`});
      root.append(box);
      root.append(svg("rect", {x: x + 0.5, y: y + 0.5, width: 5, height: tall - 1, rx: 2.5, class: `stripe ${p.role}`}));
      const room = Math.floor((wide - 24) / 7.6);
      const name = p.participant_id.length > room ? `${p.participant_id.slice(0, room - 1)}…` : p.participant_id;
      root.append(svg("text", {x: x + 14, y: y + 24, class: "lane"}, name));
      const second = p.missing ? "missing" : [words(p.role), p.kind].filter(Boolean).join(" · ");
      root.append(svg("text", {x: x + 14, y: y + 44, class: p.missing ? "quiet blamed" : "quiet"},
        second.length > room + 4 ? `${second.slice(0, room + 3)}…` : second));
      if (narrow && p.depends_on.length) {
        const calls = `→ ${p.depends_on.join(", ")}`;
        root.append(svg("text", {x: x + 14, y: y + 63, class: "quiet"}, calls.length > room + 4 ? `${calls.slice(0, room + 3)}…` : calls));
      }
      const reach = svg("rect", {x, y, width: wide, height: tall, rx: 8, class: "reach"});
      root.append(tells(reach, `node ${p.participant_id}`, `${p.participant_id}, ${words(p.role)}${p.missing ? ", missing" : ""}`, () => [
        p.participant_id, [words(p.role), p.kind].filter(Boolean).join(" · "), `state survives by ${words(p.state_survives_by)}`,
        p.reason, p.workers > 1 ? `${p.workers} workers` : "", p.depends_on.length ? `calls ${p.depends_on.join(", ")}` : "",
        p.address, p.missing]));
    }
    return root;
  }

  // Where a line may cross a column without touching a box: the space between two, nearest to `wanted`.
  function passage(count, height, step, wanted) {
    const first = (height - count * step) / 2;
    return Array.from({length: count + 1}, (_, i) => first + i * step).sort((a, b) => Math.abs(a - wanted) - Math.abs(b - wanted))[0];
  }

  return {el, seconds, bytes, percent, words, timeline, pauses, topology, hideTip};
})();
