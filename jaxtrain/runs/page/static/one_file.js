"use strict";
// The page of `jaxtrain compare --html`: its data is embedded.

(() => {
  const found = JSON.parse(document.getElementById("data").textContent);
  jaxtrain.showComparison(document.getElementById("figures"), found.comparison);
  const curves = new jaxtrain.Curves(document.getElementById("curves"));
  curves.show(
    found.runs.map(({ name, rows }, colour) => {
      const kept = new jaxtrain.RunRows(name);
      kept.add(rows);
      return { name, colour, rows: kept };
    }),
  );
  jaxtrain.theme(document.getElementById("theme"), () => curves.recolour());
})();
