// Markdown as models write it, to elements. Three walls keep what a model (or a stored conversation) says from running:
// markdown-it takes HTML as text, DOMPurify removes from its output what could run or load, and the page's policy
// refuses inline scripts, handlers, styles and foreign addresses.

import { codeHead } from "./code.js";
import { DOMPurify, MarkdownIt, hljs } from "./libraries.js";
import { mathRules, writeAlphabets } from "./math.js";

/** A longer block is shown as it is written: parsing and colouring it would hold the page up. */
const MAX_BLOCK = 100_000;
const MAX_COLOURED = 50_000;
const DEEPEST = 50;
const LINKS = /^(https?:|mailto:)/i;
const CLEANING = {
  USE_PROFILES: { html: true, mathMl: true },
  FORBID_TAGS: ["style", "form", "input", "button", "textarea", "select", "img", "audio", "video", "picture", "source"],
  FORBID_ATTR: ["style", "id", "name", "srcset", "background"],
  // KaTeX's copy of the TeX source; removed as an element, its text would be left.
  ADD_FORBID_CONTENTS: ["annotation"],
  // Tried on every attribute's value: our schemes, or no scheme at all.
  ALLOWED_URI_REGEXP: /^(?:(?:https?|mailto):|[^a-z]|[a-z+.-]+(?:[^a-z+.\-:]|$))/i,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true, maxNesting: DEEPEST + 2 }).use(mathRules);
markdown.validateLink = (address) => LINKS.test(address.trim());
// A name such as `readme.md` is no address: only what says its scheme is linked.
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
const { escapeHtml } = markdown.utils;

const fence = ({ info, content }) => {
  const language = info.trim().split(/\s+/)[0];
  return `<pre title="${escapeHtml(language)}"><code>${coloured(content.replace(/\n$/, ""), language)}</code></pre>\n`;
};
markdown.renderer.rules.fence = (tokens, at) => fence(tokens[at]);
markdown.renderer.rules.code_block = (tokens, at) => fence(tokens[at]);
// The policy loads no foreign image; a link does not load before it is followed.
markdown.renderer.rules.image = (tokens, at) => {
  const address = escapeHtml(tokens[at].attrGet("src"));
  return `<a href="${address}">${escapeHtml(tokens[at].content || "image")}</a>`;
};
// The policy refuses style attributes: a column's alignment is a class.
for (const rule of ["th_open", "td_open"]) {
  markdown.renderer.rules[rule] = (tokens, at) => {
    const side = /(right|center)/.exec(tokens[at].attrGet("style"))?.[1];
    return side ? `<${tokens[at].tag} class="${side}">` : `<${tokens[at].tag}>`;
  };
}
// One below the page's own heading.
for (const rule of ["heading_open", "heading_close"]) {
  markdown.renderer.rules[rule] = (tokens, at, options, _, renderer) => {
    tokens[at].tag = `h${Math.min(Number(tokens[at].tag[1]) + 1, 6)}`;
    return renderer.renderToken(tokens, at, options);
  };
}

function coloured(code, language) {
  if (!hljs.getLanguage(language) || code.length > MAX_COLOURED) return escapeHtml(code);
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}

/** HTML without anything that could run, load or be mistaken for the page's own parts, as a fragment. */
export function cleaned(html) {
  const fragment = DOMPurify.sanitize(html, CLEANING);
  fragment.querySelectorAll("[href]").forEach(openElsewhere);
  return fragment;
}

/** The text's blocks as {source, key, isPlain}: a block with the same key looks the same. */
function blocksOf(text, references) {
  const tokens = [];
  markdown.block.parse(text, markdown, references, tokens);
  const lines = text.split("\n");
  const known = JSON.stringify(references.references ?? {});
  const blocks = [];
  for (const { level, nesting, map, type } of tokens) {
    // markdown-it leaves out what is nested deeper than this.
    if (level >= DEEPEST) blocks.at(-1).isPlain = true;
    if (level > 0 || nesting < 0 || !map) continue;
    const source = lines.slice(map[0], map[1]).join("\n");
    const isPlain = source.length > MAX_BLOCK && !["fence", "code_block"].includes(type);
    // A reference's address counts where it may be used, not in every block.
    blocks.push({ source, isPlain, key: source.includes("]") ? `${known}\n${source}` : source });
  }
  return blocks;
}

function blockElement({ source, isPlain }, references) {
  const element = document.createElement("div");
  if (isPlain) {
    element.className = "unparsed";
    element.textContent = source;
    return element;
  }
  const block = cleaned(markdown.render(source, references));
  writeAlphabets(block);
  block.querySelectorAll("pre").forEach(frameCode);
  block.querySelectorAll("table").forEach(letScroll);
  element.append(block);
  return element;
}

function openElsewhere(link) {
  if (!LINKS.test(link.getAttribute("href"))) link.removeAttribute("href");
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
}

function frameCode(pre) {
  const frame = document.createElement("div");
  frame.className = "code";
  pre.replaceWith(frame);
  pre.tabIndex = 0;
  frame.append(codeHead(pre.title, () => pre.textContent), pre);
  pre.removeAttribute("title");
}

function letScroll(table) {
  const frame = document.createElement("div");
  frame.className = "wide";
  frame.tabIndex = 0;
  table.replaceWith(frame);
  frame.append(table);
}

/** Shows a growing text in an element: blocks that did not change since the last call keep their elements. */
export class MarkdownView {
  #shown = [];

  constructor(element) {
    this.element = element;
  }

  show(text) {
    const references = {};
    const blocks = blocksOf(text.replace(/\r\n?/g, "\n").replaceAll("\0", "\uFFFD"), references);
    let same = 0;
    while (same < blocks.length && blocks[same].key === this.#shown[same]) same++;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    this.element.append(...blocks.slice(same).map((block) => blockElement(block, references)));
    this.#shown = blocks.map(({ key }) => key);
  }
}
