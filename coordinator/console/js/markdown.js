// A model's answer as elements: paragraphs, headings, lists, bold, italics, code, and links to http(s). Everything else stays text.
//
// The answer is from outside, so nothing here makes markup of it: every piece becomes a text node of an element that is made
// here. The text may still grow. What can no longer change is laid out once; only the last block is made anew.

import { h } from "./dom.js";

/** Lists in lists, or bold in italics; deeper ones stay text. */
const DEPTH_MAX = 6;

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
/** What ends a paragraph: any other number at the start of a line is most likely part of a sentence. */
const FIRST_ITEM = /^ {0,3}([-*+]|1[.)]) +/;
const MARKED = /[\\`*_{}[\]()#+\-.!<>~|"]/;
const LINK = /\[([^[\]\n]+)\]\(([^()\s]+)\)/y;
const LETTER = /[\p{L}\p{N}]/u;

const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;

// ---- inside a line ------------------------------------------------------------------------------------------------

/** An address that a reader may follow; what is no whole http(s) address leads nowhere. */
function addressOf(given) {
  try {
    const { protocol, href } = new URL(given);
    return protocol === "http:" || protocol === "https:" ? href : null;
  } catch {
    return null;
  }
}

/** The first index behind the equal signs that begin at `at`. */
function endOfRun(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end;
}

/** Code between as many backticks as open it. `dead` holds what was looked for in vain: it is not further on, either. */
function codeAt(text, at, dead) {
  const from = endOfRun(text, at);
  const mark = text.slice(at, from);
  for (let close = dead.has(mark) ? -1 : text.indexOf(mark, from); close >= 0; ) {
    const end = endOfRun(text, close);
    if (end - close === mark.length) return { end, node: h("code", null, text.slice(from, close)) };
    close = text.indexOf(mark, end);
  }
  dead.add(mark);
  return { end: from, node: mark };
}

const EMPHASIS = { 1: ["em"], 2: ["strong"], 3: ["strong", "em"] };

/** One, two or three stars or underscores, as far as the next run of as many that can end them. */
function emphasisAt(text, at, depth, dead) {
  const sign = text[at];
  const from = endOfRun(text, at);
  const mark = text.slice(at, from);
  const tags = EMPHASIS[mark.length];
  // Inside a word an underscore is one: snake_case.
  const isWord = (one) => sign === "_" && one !== undefined && LETTER.test(one);
  const isClosed = (close) => !/[\s\\]/.test(text[close - 1]) && !isWord(text[close + mark.length]);
  const canOpen = tags && !dead.has(mark) && from < text.length && !/\s/.test(text[from]) && !isWord(text[at - 1]);
  for (let close = canOpen ? text.indexOf(mark, from + 1) : -1; close >= 0; ) {
    const end = endOfRun(text, close);
    // Of a longer run the last signs end this one, and the first ones what is inside; but one sign is no half of two.
    if (mark.length > 1) close = end - mark.length;
    if ((mark.length > 1 || end - close === 1) && isClosed(close)) {
      const inside = inline(text.slice(from, close), depth + 1);
      return { end, node: tags.reduceRight((inner, tag) => h(tag, null, inner), inside) };
    }
    close = text.indexOf(mark, end);
  }
  if (canOpen) dead.add(mark);
  return { end: from, node: mark };
}

function linkAt(text, at, depth) {
  LINK.lastIndex = at;
  const found = LINK.exec(text);
  const href = found && addressOf(found[2]);
  if (!href) return null;
  const props = { href, title: href, target: "_blank", rel: "noopener noreferrer" };
  return { end: at + found[0].length, node: h("a", props, inline(found[1], depth + 1)) };
}

/** Nodes and strings of one run of text. */
function inline(text, depth) {
  const parts = [];
  const dead = new Set();
  let plain = "";
  for (let at = 0; at < text.length; ) {
    const sign = text[at];
    if (sign === "\\" && MARKED.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
      continue;
    }
    let found = null;
    if (depth < DEPTH_MAX) {
      if (sign === "`") found = codeAt(text, at, dead);
      else if (sign === "*" || sign === "_") found = emphasisAt(text, at, depth, dead);
      else if (sign === "[") found = linkAt(text, at, depth);
    }
    if (found) {
      if (plain) parts.push(plain);
      plain = "";
      parts.push(found.node);
      at = found.end;
    } else {
      plain += sign;
      at += 1;
    }
  }
  if (plain) parts.push(plain);
  return parts;
}

// ---- blocks -------------------------------------------------------------------------------------------------------

/** A block is {end, node()}: the first line behind it, and what makes its element. A paragraph also has its `words`. */
function fenceAt(lines, from, [, mark]) {
  const isEnd = (line) => {
    const end = line.trim();
    return indentOf(line) < 4 && end.length >= mark.length && [...end].every((sign) => sign === mark[0]);
  };
  let end = from + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const code = lines.slice(from + 1, end).join("\n");
  return { end: Math.min(end + 1, lines.length), node: () => h("pre", { tabindex: 0 }, h("code", null, code)) };
}

function headingAt(lines, from, [mark, signs], depth) {
  let words = lines[from].slice(mark.length).trim();
  let end = words.length;
  while (end > 0 && words[end - 1] === "#") end -= 1;
  // Closing signs stand behind a space, or there is nothing else.
  if (end === 0 || words[end - 1] === " ") words = words.slice(0, end).trim();
  // The page's own headings end with the second level.
  const tag = `h${Math.min(6, signs.length + 2)}`;
  return { end: from + 1, node: () => h(tag, null, inline(words, depth)) };
}

const kindOf = ([, , sign]) => (/\d/.test(sign) ? sign.at(-1) : sign);

function listAt(lines, from, first, depth) {
  const kind = kindOf(first);
  const items = [];
  let inner = 0;
  // People write two spaces before a list in a list, whatever stands above it.
  const least = first[1].length + 2;
  const isInner = (line) => {
    const item = ITEM.exec(line);
    return indentOf(line) >= inner || (indentOf(line) >= least && item !== null && kindOf(item) !== kind);
  };
  let at = from;
  while (at < lines.length) {
    const line = lines[at];
    if (isBlank(line)) {
      let next = at + 1;
      while (next < lines.length && isBlank(lines[next])) next += 1;
      const item = next < lines.length ? ITEM.exec(lines[next]) : null;
      const goesOn = next < lines.length && (isInner(lines[next]) || (item !== null && kindOf(item) === kind));
      if (!goesOn) break;
      for (; at < next; at += 1) items.at(-1).push("");
      continue;
    }
    const item = ITEM.exec(line);
    if (items.length > 0 && isInner(line)) {
      items.at(-1).push(line.slice(Math.min(indentOf(line), inner)));
    } else if (item) {
      if (kindOf(item) !== kind) break;
      // Behind the sign; a wide gap is part of what follows.
      inner = item[1].length + item[2].length + (item[3].length > 4 ? 1 : Math.max(1, item[3].length));
      items.push([line.slice(inner)]);
    } else if (isBlank(lines[at - 1]) || FENCE.test(line) || HEADING.test(line)) {
      break;
    } else {
      items.at(-1).push(line.trimStart());
    }
    at += 1;
  }
  const isOrdered = kind === "." || kind === ")";
  const start = isOrdered ? Number.parseInt(first[2], 10) : 1;
  const node = () =>
    h(
      isOrdered ? "ol" : "ul",
      { start: start === 1 ? null : start },
      items.map((own) => h("li", null, itemParts(own, depth + 1))),
    );
  return { end: at, node };
}

/** The first paragraph of an item stands beside its sign, without a paragraph's distance. */
function itemParts(lines, depth) {
  const [first, ...rest] = blocksOf(lines, depth);
  if (!first) return [];
  return [first.words === undefined ? first.node() : inline(first.words, depth), rest.map((block) => block.node())];
}

function paragraphAt(lines, from, depth) {
  const interrupts = (line) => FENCE.test(line) || HEADING.test(line) || FIRST_ITEM.test(line);
  let end = from + 1;
  while (end < lines.length && !isBlank(lines[end]) && !interrupts(lines[end])) end += 1;
  const words = lines.slice(from, end).join("\n");
  return { end, words, node: () => h("p", null, inline(words, depth)) };
}

/** Blocks with the lines on which they begin and the first ones behind them. */
function blocksOf(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    if (isBlank(line)) {
      at += 1;
      continue;
    }
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    const item = depth < DEPTH_MAX ? ITEM.exec(line) : null;
    const block = fence
      ? fenceAt(lines, at, fence)
      : heading
        ? headingAt(lines, at, heading, depth)
        : item
          ? listAt(lines, at, item, depth)
          : paragraphAt(lines, at, depth);
    blocks.push({ begin: at, ...block });
    at = block.end;
  }
  return blocks;
}

/** An answer inside `element`, which it has for itself. */
export class Markdown {
  constructor(element) {
    this.element = element;
    /** Where the blocks begin that may still change, and their nodes. */
    this.from = 0;
    this.open = [];
  }

  /** `text` is the whole text, which is what was shown before and perhaps more. */
  show(text) {
    const lines = text.slice(this.from).split("\n");
    const blocks = blocksOf(lines, 0);
    // The last line may go on, and so decides nothing yet: a block has ended where a whole line begins another.
    let kept = 0;
    while (kept + 1 < blocks.length && blocks[kept + 1].begin < lines.length - 1) kept += 1;
    for (const node of this.open) node.remove();
    const nodes = blocks.map((block) => block.node());
    this.element.append(...nodes);
    this.open = nodes.slice(kept);
    if (kept > 0) for (const line of lines.slice(0, blocks[kept].begin)) this.from += line.length + 1;
  }
}
