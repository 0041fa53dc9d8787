"use strict";
// A report holds its data.

(() => {
  const {operation, facts, written_s} = JSON.parse(document.getElementById("data").textContent);
  document.getElementById("where").textContent = `${Object.entries(facts).map(([name, value]) => `${name} ${value}`).join(" · ")} · written ${views.when(written_s)}`;
  document.title = `${operation.operation} ${operation.snapshot_id} · Safepoint`;
  operation.live = null;
  views.show(document.getElementById("view"), views.operation(operation, false));
})();
