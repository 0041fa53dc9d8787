"use strict";
// The parts of the page, as elements. A figure is drawn once its place is known, and again when that changes.

const views = (() => {
  const {el, seconds, bytes, percent, words} = draw;

  function when(time_s) {
    return time_s ? `${new Date(time_s * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC` : "";
  }

  function badge(op) {
    // `live`: whether it runs now; null where nobody can say, as in a report.
    const text = op.outcome ? words(op.outcome) : op.live ? "running" : op.live === null ? "not ended" : "cut off";
    const tone = {succeeded: "good", "": op.live ? "live" : "bad"}[op.outcome] || "bad";
    return el("span", {class: `badge ${tone}`}, text);
  }

  function coverage(share, totals) {
    if (share === null || share === undefined) return totals ? el("span", {class: "quiet"}, "no rollouts") : "";
    const meter = el("meter", {min: 0, max: 1, value: share, "aria-label": `coverage ${percent(share)}`});
    return el("span", {class: "coverage"}, meter, ` ${percent(share)}`);
  }

  function table(head, rows, label) {
    return el("div", {class: "scroll"}, el("table", {"aria-label": label},
      el("thead", {}, el("tr", {}, head.map((cell) => el("th", {scope: "col"}, cell)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => el("td", {"data-head": head[i]}, cell)))))));
  }

  function figure(label, make) {
    const holder = el("div", {class: "figure", "aria-label": label, role: "group"});
    holder.redraw = () => {
      const width = Math.max(280, Math.floor(holder.clientWidth));
      holder.replaceChildren(make(width));
    };
    return holder;
  }

  function facts(pairs) {
    return el("dl", {class: "facts"}, pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined)
      .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  // ---- history --------------------------------------------------------------------------------------------------

  function history(data) {
    const done = data.operations.filter((op) => op.pause_s !== null);
    const engines = data.operations.some((op) => op.in_engines);
    const pauses = done.map((op) => op.pause_s).sort((a, b) => a - b), middle = pauses.length / 2;
    const median = (pauses[Math.ceil(middle) - 1] + pauses[Math.floor(middle)]) / 2;  // of one or two in the middle
    const failed = data.operations.filter((op) => op.outcome && op.outcome !== "succeeded").length;
    return [
      facts([["job", data.job_id], ["coordinator's epoch", data.epoch], ["operations", data.operations.length],
        ["did not succeed", failed], ["median pause", seconds(median)], ["snapshots", data.snapshot_count],
        ["participants", data.participants.filter((p) => !p.missing).length],
        ["missing", data.participants.filter((p) => p.missing).length || ""]]),
      data.operations.length ? el("section", {class: "card"}, el("h2", {}, "Pauses"),
        figure("Pause of each operation", (width) => draw.pauses(width, data.operations))) : null,
      el("section", {class: "card"}, el("h2", {}, "Saves and restores"),
        data.operations.length ? table(["began", "operation", "outcome", "took", "paused", "size", ...(engines ? ["in engines"] : []), "coverage", "cause"],
          data.operations.map((op) => [when(op.began_s),
            el("a", {href: `#/operation/${encodeURIComponent(op.operation_id)}`, "data-key": `op ${op.operation_id}`}, `${op.operation} ${op.snapshot_id}`),
            badge({...op, live: op.operation_id === data.running}), seconds(op.elapsed_s), seconds(op.pause_s),
            op.totals ? bytes(op.size_bytes) : "", ...(engines ? [op.totals ? op.in_engines : ""] : []), coverage(op.coverage, op.totals), op.cause]), "Saves and restores")
          : el("p", {class: "quiet"}, "None yet. `safepoint save` takes one."),
        data.operations.length >= data.operation_limit ? el("p", {class: "quiet"},
          `The newest ${data.operation_limit}, also counted above; \`safepoint history -n 1000\` lists older ones.`) : null),
    ];
  }

  // ---- one operation --------------------------------------------------------------------------------------------

  let zoom = {};  // by operation: which phase is looked at, also when the page is drawn again

  function operation(op, back) {
    const legend = el("div", {class: "legend", role: "group", "aria-label": "Zoom"});
    const shown = figure(`Timeline of ${op.operation_id}`, (width) => draw.timeline(width, op, range(op)));
    const choose = (name) => {
      zoom = {[op.operation_id]: zoom[op.operation_id] === name ? "" : name};
      for (const button of legend.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.zoom === (zoom[op.operation_id] || "")));
      shown.redraw();
    };
    const names = ["", ...(op.pause ? ["pause"] : []), ...new Set(op.phases.map((phase) => phase.phase))];
    for (const name of names) {
      const button = el("button", {type: "button", "data-zoom": name, "data-key": `zoom ${name}`,
        "aria-pressed": String((zoom[op.operation_id] || "") === name)},
        name ? el("span", {class: `swatch ${name}`, "aria-hidden": "true"}) : null, name ? words(name) : "whole");
      button.addEventListener("click", () => choose(name));
      legend.append(button);
    }
    const counts = el("p", {class: "key"}, [["in_flight", "in flight"], ["held", "held"], ["parked", "parked"], ["export", "written"]]
      .map(([key, name]) => el("span", {}, el("span", {class: `swatch ${key}`, "aria-hidden": "true"}), name)));
    return [
      el("div", {class: "title"}, back ? el("a", {href: "#/", "data-key": "back"}, "← History") : null,
        el("h2", {}, `${op.operation} ${op.snapshot_id} `, badge(op)), el("p", {class: "quiet"}, op.operation_id)),
      op.failure ? failure(op.failure) : null,
      facts([["began", when(op.began_s)], ["took", seconds(op.elapsed_s)], ["paused", seconds(op.pause_s)],
        ["size", op.totals ? bytes(op.size_bytes) : ""], ["coverage", op.coverage === null ? "" : percent(op.coverage)],
        ["completed", op.totals ? op.totals.completed : ""], ["in flight kept", op.totals ? op.totals.parked + op.totals.pending : ""],
        ["requests in engines kept", op.in_engines || ""],
        ["restart", op.totals ? op.totals.excluded : ""], ["mode", op.mode === "unspecified" ? "" : words(op.mode)], ["stragglers", op.operation === "save" ? op.stragglers : ""],
        ["lease", seconds(op.lease_s)], ["epoch", op.epoch || ""], ["driven by the trainer", op.trainer_driven ? "yes" : ""],
        ["not confirmed", op.unconfirmed.join(", ")], ["taken over", op.takeovers ? `${op.takeovers} times` : ""],
        ...Object.entries(op.metadata).map(([key, value]) => [`meta: ${key}`, value])]),
      el("section", {class: "card"}, el("h3", {}, "Timeline"), legend, shown, counts,
        op.lane_count > op.lanes.length ? el("p", {class: "quiet"}, `The slowest ${op.lanes.length} of ${op.lane_count} participants.`) : null),
      op.marks.some((mark) => mark.kind === "warning") ? el("section", {class: "card"}, el("h3", {}, "Warnings"),
        el("ul", {class: "warnings"}, op.marks.filter((mark) => mark.kind === "warning").map((mark) =>
          el("li", {}, el("span", {class: "quiet"}, `${seconds(mark.at_s)} `), mark.text)))) : null,
      op.lanes.some((lane) => lane.bars.length) ? el("section", {class: "card"}, el("h3", {}, "Phases"), phases(op)) : null,
      op.lanes.some((lane) => lane.role) ? el("section", {class: "card"}, el("h3", {}, "Who took part"),
        figure("Who took part", (width) => draw.topology(width, op.lanes.map((lane) => ({...lane, address: "", reason: "", missing: ""}))))) : null,
      op.dropped || op.damaged ? el("p", {class: "quiet"}, `The history of this operation has gaps: ${op.dropped} lines were not written, ${op.damaged} cannot be read.`) : null,
    ];
  }

  function range(op) {
    const name = zoom[op.operation_id];
    if (!name) return null;
    const spans = name === "pause" ? [[op.pause.from_s, op.pause.to_s]] :
      op.phases.filter((phase) => phase.phase === name).map((phase) => [phase.from_s, phase.to_s ?? op.elapsed_s]);
    if (!spans.length) return null;
    const from = Math.min(...spans.map((s) => s[0])), to = Math.max(...spans.map((s) => s[1]));
    const margin = Math.max(0.002, (to - from) * 0.05);
    return [Math.max(0, from - margin), to + margin];
  }

  function phases(op) {
    const names = [...new Set(op.phases.map((phase) => phase.phase))].filter((name) => op.lanes.some((lane) => lane.bars.some((bar) => bar.phase === name)));
    const took = (bars, name) => {
      const bar = bars.find((b) => b.phase === name);
      if (!bar) return "";
      const text = seconds((bar.to_s ?? op.elapsed_s) - bar.from_s);
      return bar.done ? text : el("span", {class: "bad"}, bar.to_s === null && op.live ? `${text}, runs` : `${text}, not finished`);
    };
    return table(["", ...names.map(words)], [
      [el("strong", {}, "everybody"), ...names.map((name) => took(op.phases, name))],
      ...op.lanes.filter((lane) => lane.bars.length).map((lane) => [lane.participant_id, ...names.map((name) => took(lane.bars, name))])], "How long each took in each phase");
  }

  function failure(why) {
    const where = [why.phase && `in ${words(why.phase)}`, why.participant_id && `at ${why.participant_id}`].filter(Boolean).join(" ");
    return el("section", {class: "card failure"}, el("h3", {}, `${why.reason} `, where),
      el("p", {}, why.message),
      why.rollouts.length ? el("ul", {}, why.rollouts.map((who) => el("li", {}, who)),
        why.rollout_count > why.rollouts.length ? el("li", {}, `and ${why.rollout_count - why.rollouts.length} more`) : null) : null,
      why.waited_s !== null ? el("p", {}, `Waited ${seconds(why.waited_s)}.`) : null,
      el("p", {}, el("strong", {}, "Next: "), why.next_step),
      why.secondary.length ? el("details", {}, el("summary", {}, `${why.secondary.length} more followed from it`),
        el("ul", {}, why.secondary.map((one) => el("li", {}, `${one.reason}${one.participant_id ? ` at ${one.participant_id}` : ""}: ${one.message}`)))) : null);
  }

  // ---- snapshots ------------------------------------------------------------------------------------------------

  function snapshots(data, verdicts, verify) {
    const names = data.snapshots.map((s) => s.snapshot_id), engines = data.snapshots.some((s) => s.in_engines);
    return [
      el("section", {class: "card"}, el("h2", {}, "Snapshots"),
        data.snapshots.length ? table(["snapshot", "published", "size", "completed", "in flight", ...(engines ? ["in engines"] : []), "restart", "pinned", "verified", "changes"],
          data.snapshots.map((s, i) => [el("strong", {}, s.snapshot_id), when(s.created_s), bytes(s.size_bytes), s.totals.completed,
            s.totals.parked + s.totals.pending, ...(engines ? [s.in_engines] : []), s.totals.excluded, s.pin_reason, verdict(s.snapshot_id, verdicts, verify),
            names[i + 1] ? el("a", {href: `#/difference/${encodeURIComponent(names[i + 1])}/${encodeURIComponent(s.snapshot_id)}`, "data-key": `diff ${s.snapshot_id}`},
              `since ${names[i + 1]}`) : ""]), "Snapshots") : el("p", {class: "quiet"}, "None yet."),
        data.snapshot_count > data.snapshots.length ? el("p", {class: "quiet"}, `and ${data.snapshot_count - data.snapshots.length} older ones`) : null),
      Object.keys(data.invalid).length ? el("section", {class: "card failure"}, el("h3", {}, "Directories that hold no snapshot"),
        el("ul", {}, Object.entries(data.invalid).map(([name, why]) => el("li", {}, el("strong", {}, name), `: ${why}`)))) : null,
    ];
  }

  function verdict(name, verdicts, verify) {
    const known = verdicts[name];
    if (known === "reading") return el("span", {class: "badge live"}, "reading");
    if (known && known.error) return el("span", {class: "bad"}, known.error);
    if (known) return el("span", {class: "badge good"}, `whole: ${known.files} file${known.files === 1 ? "" : "s"}`);
    const button = el("button", {type: "button", "data-key": `verify ${name}`, "aria-label": `Verify ${name}: read every byte`}, "verify");
    button.addEventListener("click", () => verify(name));
    return button;
  }

  function difference(diff) {
    const {before, after} = diff, states = ["completed", "parked", "pending", "excluded"];
    const sign = (a, b) => (b === a ? "same" : `${b > a ? "+" : "−"}${Math.abs(b - a)}`);
    const said = (entry) => (entry ? `${words(entry.state)}, ${entry.calls} call${entry.calls === 1 ? "" : "s"}${entry.attempt ? `, attempt ${entry.attempt}` : ""}${entry.reason ? `: ${entry.reason}` : ""}` : "");
    return [
      el("div", {class: "title"}, el("a", {href: "#/snapshots", "data-key": "back"}, "← Snapshots"),
        el("h2", {}, `From ${before.snapshot_id} to ${after.snapshot_id}`)),
      facts([["published", `${when(before.created_s)} → ${when(after.created_s)}`], ["size", `${bytes(before.size_bytes)} → ${bytes(after.size_bytes)}`],
        ["requests in engines", before.in_engines || after.in_engines ? `${before.in_engines} → ${after.in_engines}` : ""],
        ["servers", diff.same_topology ? "the same" : "not the same: a restore of one refuses the other's servers"],
        ...Object.entries(diff.rollouts.counts).map(([change, count]) => [`rollouts: ${change}`, count])]),
      el("section", {class: "card"}, el("h3", {}, "Rollouts by state"),
        table(["state", before.snapshot_id, after.snapshot_id, "change"], states.map((name) =>
          [name, before.totals[name], after.totals[name], sign(before.totals[name], after.totals[name])]), "Rollouts by state")),
      el("section", {class: "card"}, el("h3", {}, "Participants"),
        table(["participant", before.snapshot_id, after.snapshot_id], diff.participants.map((p) =>
          [p.participant_id, p.before === null ? "not there" : bytes(p.before), p.after === null ? "not there" : bytes(p.after)]), "Participants")),
      Object.keys(diff.metadata).length ? el("section", {class: "card"}, el("h3", {}, "Metadata"),
        table(["key", before.snapshot_id, after.snapshot_id], Object.entries(diff.metadata).map(([key, [a, b]]) => [key, a ?? "", b ?? ""]), "Metadata")) : null,
      diff.rollouts.rows.length ? el("section", {class: "card"}, el("h3", {}, "Rollouts that changed"),
        table(["rollout", "change", before.snapshot_id, after.snapshot_id], diff.rollouts.rows.map((row) =>
          [row.rollout_id, words(row.change), said(row.before), said(row.after)]), "Rollouts that changed")) : null,
    ];
  }

  // ---- who takes part -------------------------------------------------------------------------------------------

  function topology(data) {
    return [el("section", {class: "card"}, el("h2", {}, "Who takes part"),
      data.participants.length ? figure("Who takes part", (width) => draw.topology(width, data.participants)) :
        el("p", {class: "quiet"}, "Nobody is registered.")),
    data.participants.length ? el("section", {class: "card"}, el("h3", {}, "In words"),
      table(["participant", "role", "kind", "state survives by", "workers", "calls", "address"], data.participants.map((p) =>
        [p.participant_id, words(p.role), p.kind, p.missing ? el("span", {class: "bad"}, p.missing) : words(p.state_survives_by), p.workers, p.depends_on.join(", "), p.address]), "Participants")) : null];
  }

  function show(place, parts) {
    const active = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.key : "";
    draw.hideTip();
    place.replaceChildren(...parts.filter(Boolean));
    redraw(place);
    if (active) {
      const again = place.querySelector(`[data-key="${CSS.escape(active)}"]`);
      if (again) again.focus({preventScroll: true});
    }
  }

  function redraw(place) {
    for (const holder of place.querySelectorAll(".figure")) holder.redraw();
  }

  let width = 0;
  window.addEventListener("resize", () => {
    if (document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    redraw(document.getElementById("view"));
  });

  return {history, operation, snapshots, difference, topology, show, when};
})();
