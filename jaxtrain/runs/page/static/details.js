"use strict";
// One run: commands, data, events, configuration, environment.

jaxtrain.Details = class {
  constructor(root) {
    this.root = root;
    this.name = null;
    this.body = jaxtrain.el("div");
    this.choice = jaxtrain.el("select", {
      id: "which",
      onchange: () => this.show(this.choice.value, this.rows),
    });
    this.bar = jaxtrain.el(
      "div",
      { class: "bar" },
      jaxtrain.el("label", { for: "which" }, "Run", this.choice),
    );
    root.append(this.bar, this.body);
  }

  names(names) {
    const now = [...this.choice.options].map((option) => option.value);
    if (JSON.stringify(now) === JSON.stringify(names)) return;
    jaxtrain.fill(
      this.choice,
      names.map((name) => jaxtrain.el("option", { value: name }, name || "this run")),
    );
    if (names.includes(this.name)) this.choice.value = this.name;
  }

  // rows(name): the rows of a run, if the page has them.
  async show(name, rows) {
    this.name = name;
    this.rows = rows;
    this.choice.value = name;
    let found;
    try {
      found = await jaxtrain.fetched(jaxtrain.query("/api/details", { run: name }));
    } catch (error) {
      jaxtrain.fill(this.body, jaxtrain.el("p", { class: "error" }, error.message));
      return;
    }
    if (this.name !== name) return;
    this.found = found;
    this.events = jaxtrain.el("div");
    const { el } = jaxtrain;
    const link = found.report
      ? el(
          "p",
          {},
          el(
            "a",
            { href: jaxtrain.query("/report", { run: name }), target: "_blank", rel: "noopener" },
            "Open report.html",
          ),
        )
      : null;
    const commands = found.commands.map(({ label, command }) => jaxtrain.copyable(label, command));
    jaxtrain.fill(
      this.body,
      el("h2", {}, "Commands"),
      link,
      commands,
      this.data(found.data),
      this.events,
      this.tasks(found.tasks),
      this.files(found),
      found.config
        ? [
            el("h2", {}, "Configuration"),
            el("pre", { tabindex: "0", "aria-label": "Configuration" }, found.config),
          ]
        : null,
      el("h2", {}, "Environment"),
      jaxtrain.table(
        "Environment",
        ["Fact", "Value"],
        Object.entries(found.environment).map(([key, value]) => [
          key.replaceAll("_", " "),
          this.plain(value),
        ]),
      ),
    );
    this.update();
  }

  // Update the table of events, which are part of the rows.
  update() {
    if (!this.events) return;
    const rows = this.rows(this.name);
    const said = rows
      ? rows.events.flatMap((row) =>
          Object.entries(row)
            .filter(([key, value]) => typeof value === "string" && !["kind", "event"].includes(key))
            .map(([key, value]) => [
              row.step.toLocaleString("en"),
              jaxtrain.duration(row.time),
              key.replaceAll("_", " "),
              value,
            ]),
        )
      : [];
    const damaged =
      rows && rows.damaged
        ? jaxtrain.el(
            "p",
            { class: "error" },
            `${rows.damaged} lines of metrics.jsonl are damaged and left out.`,
          )
        : null;
    const { el } = jaxtrain;
    jaxtrain.fill(
      this.events,
      el("h2", {}, "Events"),
      damaged,
      said.length
        ? jaxtrain.table("Events", ["Step", "Time", "Event", "What"], said.slice(-100))
        : el("p", { class: "note" }, "None so far."),
    );
    this.mixture?.(rows);
  }

  plain(value) {
    if (typeof value !== "object" || value === null) return String(value);
    return Object.entries(value)
      .map(([key, one]) => `${key} ${one}`)
      .join(", ");
  }

  data(sources) {
    const { el } = jaxtrain;
    const names = Object.keys(sources);
    if (!names.length) return null;
    const count = (value) => (typeof value === "number" ? value.toLocaleString("en") : "-");
    const mixture = el("div");
    this.mixture = (rows) => {
      const last =
        rows?.kinds.train.findLast((row) => names.some((name) => `data_share_${name}` in row)) ||
        {};
      const total = names.reduce((sum, name) => sum + (sources[name].tokens || 0), 0) || 1;
      const lines = names.map((name) => {
        const { documents, tokens, bytes } = sources[name];
        const share = last[`data_share_${name}`] ?? (names.length === 1 ? 1 : null);
        const cell = el(
          "span",
          { class: "share" },
          el("meter", {
            min: 0,
            max: 1,
            value: share ?? tokens / total,
            "aria-label": `Share of ${name}`,
          }),
          `${(100 * (share ?? tokens / total)).toFixed(1)}%`,
        );
        return [
          name,
          count(documents),
          count(tokens),
          tokens ? (bytes / tokens).toFixed(2) : "-",
          tokens && documents ? count(Math.round(tokens / documents)) : "-",
          cell,
        ];
      });
      const head = [
        "Source",
        "Documents",
        "Tokens",
        "Bytes per token",
        "Tokens per document",
        Object.keys(last).length ? "Share of rows" : "Share of tokens",
      ];
      jaxtrain.fill(mixture, jaxtrain.table("Data mixture", head, lines));
    };
    this.mixture(null);
    return [
      el("h2", {}, "Data"),
      mixture,
      names.map((name) => this.lengths(name, sources[name].lengths || {})),
    ];
  }

  // Histogram of document lengths.
  lengths(name, counts) {
    const { el } = jaxtrain;
    const there = Object.entries(counts).filter(([, count]) => count > 0);
    if (there.length < 2) return null;
    const most = Math.max(...there.map(([, count]) => count));
    const lines = there.map(([end, count]) => [
      `up to ${(+end).toLocaleString("en")}`,
      el(
        "span",
        { class: "share" },
        el("meter", {
          min: 0,
          max: most,
          value: count,
          "aria-label": `Documents of up to ${end} tokens`,
        }),
        count.toLocaleString("en"),
      ),
    ]);
    return el(
      "details",
      {},
      el("summary", {}, `${name}: documents by length`),
      jaxtrain.table(`Documents of ${name} by length`, ["Tokens", "Documents"], lines),
    );
  }

  tasks(tasks) {
    const rows = Object.entries(tasks.tasks || {}).map(([label, r]) => [
      label,
      String(r.examples),
      jaxtrain.number(r.accuracy),
      jaxtrain.number(r.centered),
    ]);
    if (!rows.length) return null;
    if (typeof tasks.core === "number") rows.push(["CORE", "", "", jaxtrain.number(tasks.core)]);
    return [
      jaxtrain.el("h2", {}, "Tasks"),
      jaxtrain.table("Tasks", ["Task", "Examples", "Accuracy", "Centered"], rows),
    ];
  }

  files(found) {
    const steps = found.checkpoints.map((step) => step.toLocaleString("en"));
    const saved = found.checkpoints.length
      ? `Checkpoints of steps ${steps.join(", ")}.`
      : "No checkpoints.";
    return [
      jaxtrain.el("h2", {}, "Models"),
      jaxtrain.el("p", {}, `${saved} ${found.model ? "The finished model is in model/." : ""}`),
    ];
  }
};
