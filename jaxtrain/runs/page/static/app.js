"use strict";
// The page: the list of runs next to the views, and one stream of rows for the selected runs.

jaxtrain.App = class {
  constructor(options) {
    const at = (id) => document.getElementById(id);
    jaxtrain.folder = options.folder;
    at("folder").textContent = options.folder;
    this.rows = new Map();
    this.status = at("status");
    const asked = new URLSearchParams(location.hash.slice(1));
    this.asked = asked;
    this.curves = new jaxtrain.Curves(at("curves"), {
      axis: asked.get("axis"),
      logX: asked.has("logX"),
      logY: asked.has("logY"),
      smooth: asked.has("smooth") ? +asked.get("smooth") || 0 : undefined,
    });
    this.curves.changed = () => this.remember();
    this.list = new jaxtrain.RunList(
      at("runs"),
      at("filter"),
      () => this.chosen(),
      (name) => this.open(name),
    );
    this.list.chosen = asked.getAll("run");
    this.samples = new jaxtrain.Samples(at("samples"));
    this.details = new jaxtrain.Details(at("details"));
    this.estimate = new jaxtrain.Estimate(at("estimate"), options);
    this.chat = new jaxtrain.Chat(at("chat"), options);
    this.compare = at("compare");
    this.tab = null;
    this.choose = jaxtrain.tabs(document.querySelector("[role=tablist]"), (name) => {
      this.tab = name;
      this.refresh();
      this.remember();
    });
    jaxtrain.theme(at("theme"), () => this.curves.recolour());
  }

  begin(runs) {
    this.list.update(runs);
    const names = runs.map((run) => run.name);
    this.list.chosen = this.list.chosen.filter((name) => names.includes(name));
    this.suggest();
    this.follow();
    this.choose(this.asked.get("tab"));
  }

  // Default selection, before the user selects: a run that trains, or else the last that did.
  suggest() {
    if (this.list.touched || this.list.chosen.length) return false;
    const trained = this.list.runs.filter((run) => run.step !== null);
    const first = trained.find((run) => run.state === "running") || trained[0];
    if (first) this.list.chosen = [first.name];
    return Boolean(first);
  }

  // Store the current view in the URL, so that it can be bookmarked and shared.
  remember() {
    const { view } = this.curves;
    const words = new URLSearchParams(this.list.chosen.map((name) => ["run", name]));
    words.set("tab", this.tab);
    words.set("axis", view.axis);
    words.set("smooth", view.smooth);
    for (const key of ["logX", "logY"]) if (view[key]) words.set(key, "1");
    history.replaceState(null, "", `#${words}`);
  }

  chosen() {
    this.follow();
    this.refresh();
    this.remember();
  }

  // Keep the rows of the selected runs only.
  follow() {
    this.list.update(this.list.runs);
    for (const name of this.rows.keys())
      if (!this.list.chosen.includes(name)) this.rows.delete(name);
    for (const name of this.list.chosen)
      if (!this.rows.has(name)) this.rows.set(name, new jaxtrain.RunRows(name));
    this.connect();
  }

  open(name) {
    this.details.name = name;
    if (!this.list.chosen.includes(name)) this.list.choose(name, true);
    this.choose("details");
    document.getElementById("tab-details").focus();
  }

  // Open one stream for all selected runs. A new stream begins with all rows.
  connect() {
    this.stream?.close();
    this.stream = new EventSource(
      jaxtrain.query(
        "/api/events",
        this.list.chosen.map((name) => ["run", name]),
      ),
    );
    this.stream.addEventListener("runs", (event) => {
      this.list.update(JSON.parse(event.data));
      this.names();
      if (this.suggest()) this.chosen();
    });
    this.stream.addEventListener("rows", (event) => {
      const { run, reset, rows, damaged } = JSON.parse(event.data);
      const kept = this.rows.get(run);
      if (!kept) return;
      if (reset) kept.clear();
      kept.add(rows);
      kept.damaged = damaged;
      this.soon();
    });
    this.stream.addEventListener("open", () => this.state("live"));
    this.stream.addEventListener("error", () => this.state("no answer, trying again"));
  }

  state(text) {
    this.status.textContent = text;
    this.status.className = `status ${text === "live" ? "is-live" : "is-lost"}`;
  }

  // Rows arrive in bursts, so draw at most once per frame.
  soon() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      if (this.tab === "curves") this.draw();
      if (this.tab === "details") this.details.update();
      if (this.tab === "samples") this.samples.show(this.list.chosen);
    });
  }

  draw() {
    this.curves.show(
      this.list.chosen.map((name) => ({
        name,
        colour: this.list.colour(name),
        rows: this.rows.get(name),
      })),
    );
  }

  names() {
    this.details.names(this.list.runs.map((run) => run.name));
  }

  refresh() {
    const chosen = this.list.chosen;
    this.names();
    if (this.tab === "curves") this.draw();
    if (this.tab === "compare") this.showCompare(chosen);
    if (this.tab === "samples") this.samples.show(chosen);
    if (this.tab === "chat") this.chat.open();
    if (this.tab === "details") {
      const names = this.list.runs.map((run) => run.name);
      const name = names.includes(this.details.name) ? this.details.name : (chosen[0] ?? names[0]);
      if (name !== undefined) this.details.show(name, (one) => this.rows.get(one));
    }
  }

  async showCompare(names) {
    const { el } = jaxtrain;
    if (names.length < 2) {
      jaxtrain.fill(
        this.compare,
        el(
          "p",
          { class: "empty" },
          "Choose two runs or more: their figures and the settings that differ appear here.",
        ),
      );
      return;
    }
    const paths = names.map((name) => `${jaxtrain.folder}/${name}`);
    try {
      const found = await jaxtrain.fetched(
        jaxtrain.query(
          "/api/compare",
          names.map((name) => ["run", name]),
        ),
      );
      if (this.list.chosen !== names) return;
      const tables = el("div");
      jaxtrain.showComparison(tables, found);
      jaxtrain.fill(
        this.compare,
        tables,
        el("h2", {}, "Keep it"),
        jaxtrain.copyable("The same as one file", [
          "jaxtrain",
          "compare",
          ...paths,
          "--html",
          "compare.html",
        ]),
      );
    } catch (error) {
      jaxtrain.fill(this.compare, el("p", { class: "error" }, error.message));
    }
  }
};

(async () => {
  try {
    const [options, runs] = await Promise.all([
      jaxtrain.fetched("/api/options"),
      jaxtrain.fetched("/api/runs"),
    ]);
    jaxtrain.app = new jaxtrain.App(options);
    jaxtrain.app.begin(runs);
  } catch (error) {
    document.getElementById("status").textContent = `no answer: ${error.message}; reload the page`;
  }
})();
