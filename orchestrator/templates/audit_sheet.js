"use strict";
const sheet = document.body.dataset.audit, store = "gagar-audit-" + sheet;
const rater = document.getElementById("rater"), done = document.getElementById("done");
function collect() {
  const answers = {};
  for (const box of document.querySelectorAll("[data-key]")) {
    const scores = [...box.querySelectorAll("select")].map((s) => Number(s.value));
    const flags = [...box.querySelectorAll("input:checked")].map((f) => f.value);
    if (scores.every((s) => s > 0)) (answers[box.dataset.case] ||= {})[box.dataset.key] = { scores, flags };
  }
  return { audit: sheet, rater: rater.value.trim() || "anonymous", answers };
}
function count(all) { return Object.values(all.answers).reduce((n, c) => n + Object.keys(c).length, 0); }
function told(all) { done.textContent = count(all) + " of " + document.querySelectorAll("[data-key]").length; }
function keep() { const all = collect(); told(all); try { localStorage.setItem(store, JSON.stringify(state())); } catch (e) { /* a browser may refuse */ } }
function fields() { return [...document.querySelectorAll("select, input")]; }
function state() { return fields().map((f) => (f.type === "checkbox" ? f.checked : f.value)); }
try {
  const kept = JSON.parse(localStorage.getItem(store) || "[]");
  fields().forEach((f, i) => { if (i < kept.length) { if (f.type === "checkbox") f.checked = kept[i]; else f.value = kept[i]; } });
} catch (e) { /* nothing was kept */ }
document.addEventListener("change", keep);
document.getElementById("save").addEventListener("click", () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(collect(), null, 1)], { type: "application/json" }));
  link.download = "answers-" + sheet + ".json";
  link.click();
});
told(collect());
