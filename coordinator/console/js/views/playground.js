// The playground: a chat with the model, each answer with its timings and a link to its waterfall.

import { getJson } from "../api.js";
import { streamChat } from "../chat-stream.js";
import { copyButton } from "../copy.js";
import { h, perFrame, replace } from "../dom.js";
import { Turn } from "./chat-answer.js";

const SETTINGS_KEY = "baton.playground";
/** Of this visit; another view and back must not lose a conversation. */
const turns = [];

function storedSettings() {
  try {
    return JSON.parse(localStorage.getItem(SETTINGS_KEY)) ?? {};
  } catch {
    return {};
  }
}

class PlaygroundView {
  constructor(root, app) {
    this.app = app;
    const stored = storedSettings();
    const field = (label, input, unit) =>
      h(
        "label",
        { class: "field stacked" },
        h("span", null, label),
        input,
        unit ? h("small", { class: "muted" }, unit) : null,
      );
    this.model = h("select", { id: "chat-model", disabled: true }, h("option", { value: "" }, "reading the list"));
    this.temperature = h("input", {
      id: "chat-temperature",
      type: "number",
      min: 0,
      max: 2,
      step: 0.1,
      value: stored.temperature ?? 0.7,
      required: true,
    });
    this.maxTokens = h("input", {
      id: "chat-max-tokens",
      type: "number",
      min: 1,
      step: 1,
      value: stored.max_tokens ?? 256,
      required: true,
    });
    this.system = h("textarea", { id: "chat-system", rows: 4, spellcheck: false, placeholder: "none" });
    this.system.value = stored.system ?? "";
    this.modelNote = h("p", { class: "muted" });
    this.log = h("div", { class: "chat-log", role: "log", "aria-label": "Conversation", tabindex: 0 });
    this.prompt = h("textarea", {
      id: "chat-prompt",
      rows: 3,
      placeholder: "Ask the model. Enter sends, Shift Enter starts a new line.",
      "aria-label": "Message",
      on: { keydown: (event) => this.typed(event) },
    });
    this.send = h("button", { type: "submit", class: "primary", id: "chat-send" }, "Send");
    this.stop = h(
      "button",
      { type: "button", id: "chat-stop", disabled: true, on: { click: () => this.stopAnswer() } },
      "Stop",
    );
    this.form = h(
      "form",
      { class: "chat-form", novalidate: true, on: { submit: (event) => this.submit(event) } },
      this.prompt,
      h("div", { class: "chat-actions" }, this.send, this.stop),
    );
    root.append(
      h("h1", { class: "visually-hidden" }, "Playground"),
      h(
        "div",
        { class: "chat" },
        h("section", { class: "chat-main" }, this.log, this.form),
        h(
          "aside",
          { class: "panel chat-settings", "aria-label": "Settings" },
          h("h2", null, "Settings"),
          field("Model", this.model),
          this.modelNote,
          field("Temperature", this.temperature, "0 always takes the likeliest token"),
          field("Max tokens", this.maxTokens, "tokens of the answer"),
          field("System message", this.system),
          h(
            "div",
            { class: "chat-tools" },
            h("button", { type: "button", id: "chat-clear", on: { click: () => this.clear() } }, "New conversation"),
            copyButton("Copy CLI", "command", "baton chat"),
          ),
        ),
      ),
    );
    this.showLog();
    this.readModels();
    this.prompt.focus();
  }

  async readModels() {
    try {
      const { data } = await getJson("/v1/models");
      replace(
        this.model,
        data.map((model) => h("option", { value: model.id }, model.id)),
      );
      const longest = data[0]?.max_model_len;
      this.modelNote.textContent = longest ? `up to ${longest.toLocaleString("en")} tokens with the prompt` : "";
      this.model.disabled = false;
    } catch (problem) {
      replace(this.model, h("option", { value: "" }, "unknown"));
      this.modelNote.replaceChildren(
        `The models could not be read. ${problem.message} `,
        h("button", { type: "button", class: "small", on: { click: () => this.readModels() } }, "Try again"),
      );
    }
  }

  showLog() {
    replace(
      this.log,
      turns.length > 0
        ? turns.map((turn) => turn.element)
        : h(
            "p",
            { class: "muted pad chat-empty" },
            "Nothing said yet. Each answer shows where its time went, and links to its waterfall.",
          ),
    );
    this.log.scrollTop = this.log.scrollHeight;
  }

  typed(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.form.requestSubmit();
  }

  settings() {
    const temperature = this.temperature.valueAsNumber;
    const maxTokens = this.maxTokens.valueAsNumber;
    try {
      localStorage.setItem(
        SETTINGS_KEY,
        JSON.stringify({ temperature, max_tokens: maxTokens, system: this.system.value }),
      );
    } catch {
      // Only a convenience.
    }
    // What is not a number is left out, and the server's default holds; what it refuses it says in words.
    return {
      model: this.model.value,
      ...(Number.isFinite(temperature) && { temperature }),
      ...(Number.isFinite(maxTokens) && { max_tokens: maxTokens }),
    };
  }

  submit(event) {
    event.preventDefault();
    const content = this.prompt.value.trim();
    if (!content || this.reading) return;
    this.prompt.value = "";
    const asked = new Turn("user");
    asked.add(content);
    asked.show();
    const answer = new Turn("assistant");
    answer.waits();
    turns.push(asked, answer);
    this.showLog();
    this.answer(answer);
  }

  /** Answers that failed or were stopped before a word are not part of what the model is told, and their questions neither:
   * templates of some models refuse two questions in a row. */
  messages(upTo) {
    const before = turns.slice(0, turns.indexOf(upTo));
    const isAnswered = (at) => at === before.length - 1 || before[at + 1].text;
    const said = before
      .filter((turn, at) => turn.text && (turn.role !== "user" || isAnswered(at)))
      .map((turn) => ({ role: turn.role, content: turn.text }));
    const system = this.system.value.trim();
    return system ? [{ role: "system", content: system }, ...said] : said;
  }

  async answer(turn) {
    const reading = new AbortController();
    this.reading = reading;
    this.stop.disabled = false;
    this.send.disabled = true;
    let pieces = 0;
    const painting = perFrame(() =>
      this.follow(() => {
        turn.show();
        turn.streams(pieces);
      }),
    );
    const on = {
      id: (id) => (turn.responseId = id),
      text: (piece) => {
        pieces += 1;
        turn.add(piece);
        painting.ask();
      },
    };
    try {
      const end = await streamChat(this.settings(), this.messages(turn), on, reading.signal);
      painting.finish();
      this.follow(() => turn.ended(end));
    } catch (problem) {
      painting.finish();
      this.follow(() => (reading.signal.aborted ? turn.stopped() : turn.failed(problem.message)));
    }
    this.reading = null;
    this.stop.disabled = true;
    this.send.disabled = false;
    if (this.form.isConnected) this.prompt.focus();
  }

  /** Changes the log and keeps its end in sight, unless the reader had scrolled up. */
  follow(change) {
    const { log } = this;
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 120;
    change();
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  stopAnswer() {
    this.reading?.abort();
  }

  clear() {
    this.stopAnswer();
    turns.length = 0;
    this.showLog();
    this.prompt.focus();
  }

  keys() {
    const stop = () => (this.reading ? this.stopAnswer() : false);
    return { Escape: stop, EscapeInField: stop };
  }

  dispose() {
    // Nobody would read the rest.
    this.stopAnswer();
  }
}

export function mountPlayground(root, _route, app) {
  const view = new PlaygroundView(root, app);
  return { title: "Playground", keys: view.keys(), dispose: () => view.dispose() };
}
