// Makes HTML and SVG elements; whatever comes from outside becomes a text node or an attribute value, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, run] of Object.entries(value)) element.addEventListener(event, run);
    // The page's policy forbids style attributes; single properties set by script are allowed.
    else if (name === "css") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (Array.isArray(child)) append(element, child);
    else if (child !== null && child !== undefined && child !== false) element.append(child);
  }
}

/** `h("p", {class: "note", on: {click}}, "text", child)`. */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/** Replaces everything inside `element`; nested lists and nothing-values are allowed, as in `h`. */
export function replace(element, ...children) {
  const fragment = document.createDocumentFragment();
  append(fragment, children);
  element.replaceChildren(fragment);
}

/** Sets text only when it differs: a live page then leaves selections and screen readers alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Paints at most once per frame, however often it is asked: tokens may come faster than a slow machine lays them out.
 * `finish()` paints what is left at once (a hidden page has no frames), and nothing after it.
 */
export function perFrame(paint) {
  let frame = null;
  const painted = () => {
    frame = null;
    paint();
  };
  return {
    ask() {
      frame ??= requestAnimationFrame(painted);
    },
    finish() {
      if (frame === null) return;
      cancelAnimationFrame(frame);
      painted();
    },
  };
}

/**
 * A table: `columns` are {title, className}; a cell is a string, an element, or {className, content} for a class of its own. On a
 * narrow page a row becomes a list of its cells, each behind its heading; the roles then say that it is still a table.
 */
export function table(caption, columns, rows) {
  const cell = (given, at) => {
    const isOwn = given?.content !== undefined && !(given instanceof Node);
    const className = [columns[at].className, isOwn ? given.className : null].filter(Boolean).join(" ");
    const content = h("span", null, isOwn ? given.content : given);
    return h("td", { role: "cell", class: className || null, data: { label: columns[at].title } }, content);
  };
  return h(
    "table",
    { class: "plain", role: "table" },
    h("caption", { class: "visually-hidden" }, caption),
    h(
      "thead",
      null,
      h(
        "tr",
        null,
        columns.map((c) => h("th", { scope: "col", class: c.className }, c.title)),
      ),
    ),
    h(
      "tbody",
      null,
      rows.map((cells) => h("tr", { role: "row" }, cells.map(cell))),
    ),
  );
}
