// One turn of the playground: who said what, and under an answer where its time went.

import { h, replace, setText } from "../dom.js";
import { bytes, count, ms, NONE, number, words } from "../format.js";
import { Markdown } from "../markdown.js";
import { link } from "../router.js";

const fact = (name, value, title) => h("span", { class: "timing", title }, h("b", null, name), ` ${value}`);

/** `null` means that this part of the path was not passed through. */
function timings(metrics, responseId) {
  const perSecond = Number.isFinite(metrics.tokens_per_second) ? `${number(metrics.tokens_per_second)} tokens/s` : NONE;
  const place = metrics.local_prefill
    ? `local prefill (${words(metrics.local_prefill)})`
    : `${metrics.prefill_node ?? NONE} → ${metrics.decode_node ?? NONE}`;
  return [
    fact("TTFT", ms(metrics.ttft_ms), "time to first token"),
    fact("queue", ms(metrics.queue_ms)),
    fact("prefill", ms(metrics.prefill_ms)),
    fact(
      "KV transfer",
      ms(metrics.kv_transfer_ms),
      metrics.kv_bytes > 0
        ? `${bytes(metrics.kv_bytes)} by ${metrics.transport}; overlaps with prefill`
        : "no KV was moved",
    ),
    fact("decode", ms(metrics.decode_ms)),
    h("span", { class: "timing" }, h("b", null, perSecond)),
    fact(
      "tokens",
      `${number(metrics.prompt_tokens)} in (${number(metrics.cached_tokens)} cached), ${number(metrics.output_tokens)} out`,
    ),
    h("span", { class: "timing muted" }, place),
    responseId ? h("a", { href: link("requests", responseId) }, "Waterfall") : null,
  ];
}

export class Turn {
  constructor(role) {
    this.role = role;
    this.text = "";
    this.responseId = null;
    this.body = h("div", { class: "turn-text" });
    // What people type stays as they typed it.
    this.markdown = role === "assistant" ? new Markdown(this.body) : null;
    this.foot = h("div", { class: "turn-foot" });
    this.element = h(
      "article",
      { class: `turn turn-${role}`, "aria-label": role === "user" ? "You" : "Answer" },
      h("h2", null, role === "user" ? "You" : "Model"),
      this.body,
      this.foot,
    );
  }

  add(piece) {
    this.text += piece;
  }

  /** Shows what was added since the last time. */
  show() {
    if (this.markdown) this.markdown.show(this.text);
    else setText(this.body, this.text);
  }

  waits() {
    this.element.classList.add("is-streaming");
    replace(this.foot, h("span", { class: "muted" }, "waiting for the first token"));
  }

  streams(pieces) {
    setText(this.foot, `${count(pieces, "token")} so far`);
  }

  ended({ metrics, usage, finishReason }) {
    this.element.classList.remove("is-streaming");
    const note = finishReason === "length" ? h("span", { class: "timing" }, "cut at max tokens") : null;
    if (metrics) replace(this.foot, timings(Array.isArray(metrics) ? metrics[0] : metrics, this.responseId), note);
    else
      replace(
        this.foot,
        usage ? fact("tokens", `${number(usage.prompt_tokens)} in, ${number(usage.completion_tokens)} out`) : null,
        this.waterfallLink(),
        note,
      );
  }

  stopped() {
    this.element.classList.remove("is-streaming");
    replace(this.foot, h("span", { class: "timing" }, "⊘ stopped by you"), this.waterfallLink());
  }

  failed(message) {
    this.element.classList.remove("is-streaming");
    replace(this.foot, h("span", { class: "is-failed", role: "alert" }, `✕ ${message}`), this.waterfallLink());
  }

  waterfallLink() {
    return this.responseId ? h("a", { href: link("requests", this.responseId) }, "Waterfall") : null;
  }
}
