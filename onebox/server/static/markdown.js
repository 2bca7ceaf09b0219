// The little Markdown that answers use: headings, lists, quotes, code, bold and italic. Anything else stays as written.
// Elements are made one by one from text, so an answer cannot become markup.

import { make } from "./dom.js";

const FENCE = /^\s{0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^\s{0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const ITEM = /^(\s*)(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^\s{0,3}>\s?(.*)$/;
const INLINE = /(`+)([^`]|[^`].*?[^`])\1(?!`)|\*\*(?=\S)(.+?)\*\*|(?<![\w*])\*(?=[^\s*])([^*\n]+?)\*(?![\w*])/gs;

/** Blocks of a text, in order: {kind, ...}. An unclosed code block reaches to the end, as it does while it streams. */
export function parseBlocks(text) {
  const lines = text.split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    const [block, next] = readBlock(lines, at);
    if (block) blocks.push(block);
    at = next;
  }
  return blocks;
}

function readBlock(lines, at) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = FENCE.exec(line);
  if (fence) return readCode(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [{ kind: "heading", level: heading[1].length, text: heading[2] }, at + 1];
  if (ITEM.test(line)) return readList(lines, at);
  const isQuote = QUOTE.test(line);
  const taken = [];
  while (at < lines.length && (isQuote ? QUOTE.test(lines[at]) : isPlain(lines[at]))) taken.push(lines[at++]);
  if (isQuote) return [{ kind: "quote", text: taken.map((each) => QUOTE.exec(each)[1]).join("\n") }, at];
  return [{ kind: "paragraph", text: taken.join("\n") }, at];
}

const isPlain = (line) => line.trim() && ![FENCE, HEADING, ITEM, QUOTE].some((pattern) => pattern.test(line));

function readCode(lines, at, [, mark, language]) {
  const closes = (line) => line.trim().startsWith(mark) && !line.trim().replaceAll(mark[0], "");
  const begin = at + 1;
  let end = begin;
  while (end < lines.length && !closes(lines[end])) end++;
  return [{ kind: "code", language, text: lines.slice(begin, end).join("\n") }, end + 1];
}

/** One list with the depth of each item; lines that are indented and no item belong to the item before them. */
function readList(lines, at) {
  const items = [];
  const isOrdered = ITEM.exec(lines[at])[2] === undefined;
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (item) {
      const depth = item[1].replaceAll("\t", "    ").length;
      if (depth === 0 && items.length && (item[2] === undefined) !== isOrdered) break;
      items.push({ depth, isOrdered: item[2] === undefined, start: Number(item[3] ?? 0), text: item[4] });
    } else if (/^\s+\S/.test(lines[at]) && !FENCE.test(lines[at])) {
      items.at(-1).text += `\n${lines[at].trim()}`;
    } else if (lines[at].trim() || !ITEM.test(lines[at + 1] ?? "")) {
      break;
    }
    at++;
  }
  return [{ kind: "list", items }, at];
}

/** A text's inline marks as nodes. */
export function inlineNodes(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > end) nodes.push(text.slice(end, match.index));
    const [, , code, bold, italic] = match;
    if (code !== undefined) nodes.push(make("code", {}, code));
    else if (bold !== undefined) nodes.push(make("strong", {}, ...inlineNodes(bold)));
    else nodes.push(make("em", {}, ...inlineNodes(italic)));
    end = match.index + match[0].length;
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

function blockElement(block) {
  switch (block.kind) {
    case "code":
      return codeElement(block);
    case "heading":
      // One below the page's own heading.
      return make(`h${Math.min(block.level + 1, 6)}`, {}, ...inlineNodes(block.text));
    case "list":
      return listElement(block.items);
    case "quote":
      return make("blockquote", {}, ...parseBlocks(block.text).map(blockElement));
    default:
      return make("p", {}, ...inlineNodes(block.text));
  }
}

function codeElement({ language, text }) {
  const head = make("div", { class: "code-head" }, make("span", {}, language || "code"));
  if (navigator.clipboard) {
    const copy = make("button", { type: "button" }, "Copy");
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    });
    head.append(copy);
  }
  return make("div", { class: "code" }, head, make("pre", {}, make("code", {}, text)));
}

/** Items that are deeper than the first of their list make a list inside the item before them. */
function listElement(items) {
  const [first] = items;
  const list = make(first.isOrdered ? "ol" : "ul");
  if (first.isOrdered) list.start = first.start;
  for (let at = 0; at < items.length; ) {
    const item = make("li", {}, ...inlineNodes(items[at++].text));
    const begin = at;
    while (at < items.length && items[at].depth > first.depth + 1) at++;
    if (at > begin) item.append(listElement(items.slice(begin, at)));
    list.append(item);
  }
  return list;
}

/** Shows a growing text in an element: blocks that did not change since the last call keep their elements. */
export class MarkdownView {
  #shown = [];

  constructor(element) {
    this.element = element;
  }

  show(text) {
    const blocks = parseBlocks(text);
    const sources = blocks.map((block) => JSON.stringify(block));
    let same = 0;
    while (same < sources.length && sources[same] === this.#shown[same]) same++;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    this.element.append(...blocks.slice(same).map(blockElement));
    this.#shown = sources;
  }
}
