"use strict";
// A chat with a served model, or a text that it continues.

jaxtrain.Chat = class {
  constructor(root, options) {
    const { el } = jaxtrain;
    this.root = root;
    this.messages = [];
    this.endpoints = options.endpoints;
    this.models = options.models;
    if (!this.endpoints.length && !this.models.length) {
      root.append(
        el(
          "p",
          { class: "empty" },
          "No run of this folder has a model yet, and there is no server to chat with. Start one " +
            "with OpenAI's API, then this page with --endpoint and its URL.",
        ),
        jaxtrain.copyable("Start the page with a server", [
          "jaxtrain",
          "ui",
          options.folder,
          "--endpoint",
          "http://127.0.0.1:8000",
        ]),
      );
      return;
    }
    this.model = el("select", { id: "model" });
    this.mode = el(
      "select",
      { id: "mode" },
      el("option", { value: "chat" }, "a conversation"),
      el("option", { value: "text" }, "a text to continue"),
    );
    this.temperature = el("input", {
      type: "number",
      id: "temperature",
      min: "0",
      max: "2",
      step: "0.1",
      value: "0.8",
    });
    this.most = el("input", { type: "number", id: "most", min: "1", max: "8192", value: "256" });
    this.log = el("div", {
      class: "chat",
      role: "log",
      "aria-label": "Conversation",
      tabindex: "0",
    });
    this.text = el("textarea", {
      id: "message",
      rows: "2",
      placeholder: "Write a message",
      "aria-label": "Message",
    });
    this.send = el("button", { type: "submit", class: "main" }, "Send");
    this.stop = el(
      "button",
      { type: "button", disabled: true, onclick: () => this.running?.abort() },
      "Stop",
    );
    const clear = el("button", { type: "button", onclick: () => this.clear() }, "New chat");
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.form.requestSubmit();
      }
    });
    this.form = el(
      "form",
      { class: "write", onsubmit: (event) => this.ask(event) },
      this.text,
      el("div", { class: "group" }, this.send, this.stop, clear),
    );
    root.append(
      el(
        "div",
        { class: "bar" },
        el("label", { for: "model" }, "Model", this.model),
        el("label", { for: "mode" }, "As", this.mode),
        el("label", { for: "temperature" }, "Temperature", this.temperature),
        el("label", { for: "most" }, "Tokens at most", this.most),
      ),
      this.log,
      this.form,
    );
  }

  // List the servers' models, fetched each time the panel is opened, and the runs' models. An
  // option's value is the server's index and the model's name, or run@STEP and the run's name.
  async open() {
    if (!this.model) return;
    const kept = this.model.value;
    const found = await Promise.all(
      this.endpoints.map(async (url, i) => {
        try {
          const { data } = await jaxtrain.fetched(jaxtrain.query("/v1/models", { endpoint: i }));
          const where = this.endpoints.length > 1 ? ` at ${url}` : "";
          return data.map(({ id, max_model_len: length }) => {
            if (length) this.most.value = Math.min(+this.most.value, length >> 1);
            return jaxtrain.el("option", { value: `${i} ${id}` }, id + where);
          });
        } catch (error) {
          this.add("error", error.message);
          return [];
        }
      }),
    );
    const own = this.models.flatMap(({ run, whole, steps }) => [
      ...(whole ? [jaxtrain.el("option", { value: `run@ ${run}` }, `${run} (loaded here)`)] : []),
      ...steps
        .toReversed()
        .map((step) =>
          jaxtrain.el("option", { value: `run@${step} ${run}` }, `${run} at step ${step}`),
        ),
    ]);
    jaxtrain.fill(this.model, found, own);
    if ([...this.model.options].some((one) => one.value === kept)) this.model.value = kept;
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    jaxtrain.fill(this.log);
  }

  add(role, text) {
    const { el } = jaxtrain;
    const body = el("p", {}, text);
    this.log.append(
      el(
        "div",
        { class: `turn is-${role}` },
        el(
          "b",
          {},
          { user: "You", assistant: this.model.value.replace(/^\S+ /, ""), error: "Error" }[role],
        ),
        body,
      ),
    );
    this.log.scrollTop = this.log.scrollHeight;
    return body;
  }

  async ask(event) {
    event.preventDefault();
    const said = this.text.value.trim();
    if (!said || this.running || !this.model.value) return;
    this.text.value = "";
    this.messages.push({ role: "user", content: said });
    this.add("user", said);
    const own = this.model.value.startsWith("run@");
    const busy = own && this.loaded !== this.model.value ? "Loading the model ..." : "";
    const body = this.add("assistant", busy);
    this.running = new AbortController();
    this.send.disabled = true;
    this.stop.disabled = false;
    let answer = "";
    try {
      for await (const part of this.parts(this.running.signal)) {
        if (own) this.loaded = this.model.value;
        answer += part;
        body.textContent = answer;
        this.log.scrollTop = this.log.scrollHeight;
      }
    } catch (error) {
      if (error.name !== "AbortError") this.add("error", error.message);
    } finally {
      if (answer) this.messages.push({ role: "assistant", content: answer });
      else {
        this.messages.pop();
        body.parentElement.remove();
      }
      this.running = null;
      this.send.disabled = false;
      this.stop.disabled = true;
    }
  }

  // Stream the answer. A model without a chat template only continues the last message.
  async *parts(signal) {
    const [, where, name] = this.model.value.match(/^(\S+) (.*)$/s);
    const own = where.startsWith("run@");
    const place = own ? { run: name, step: where.slice(4) } : { endpoint: where };
    const chat = this.mode.value === "chat";
    const asked = chat ? { messages: this.messages } : { prompt: this.messages.at(-1).content };
    const body = JSON.stringify({
      ...(own ? {} : { model: name }),
      ...asked,
      stream: true,
      temperature: +this.temperature.value,
      max_tokens: +this.most.value,
    });
    const path = jaxtrain.query(chat ? "/v1/chat/completions" : "/v1/completions", place);
    const answer = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body,
      signal,
    });
    if (!answer.ok) {
      const found = await answer.json().catch(() => ({}));
      throw new Error(
        found.error?.message || found.error || `the server answered ${answer.status}`,
      );
    }
    let rest = "";
    for await (const text of answer.body.pipeThrough(new TextDecoderStream())) {
      const lines = (rest + text).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:") || line.includes("[DONE]")) continue;
        const found = JSON.parse(line.slice(5));
        if (found.error) throw new Error(found.error.message);
        const choice = found.choices?.[0];
        yield choice?.delta?.content || choice?.text || "";
      }
    }
  }
};
