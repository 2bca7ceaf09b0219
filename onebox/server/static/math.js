// Formulas: where they are in Markdown ($...$, $$...$$, \(...\), \[...\]), and TeX to MathML, which browsers draw
// without fonts or styles of ours.

import { katex } from "./libraries.js";

const BLOCKS = [["$$", "$$"], ["\\[", "\\]"]];
/** Bounds for what a model writes: sizes in em, expansions of macros, characters. */
const LIMITS = { maxSize: 20, maxExpand: 500 };
const MAX_CHARACTERS = 5000;

/** A markdown-it plugin: tokens `math_inline` and `math_block`, whose content is TeX. */
export function mathRules(markdown) {
  markdown.inline.ruler.before("escape", "math_inline", inlineRule);
  markdown.block.ruler.after("blockquote", "math_block", blockRule, {
    alt: ["paragraph", "reference", "blockquote", "list"],
  });
  markdown.renderer.rules.math_inline = (tokens, at) => mathml(tokens[at].content, tokens[at].meta.isDisplay, markdown);
  markdown.renderer.rules.math_block = (tokens, at) => `<p>${mathml(tokens[at].content, true, markdown)}</p>\n`;
}

/** The formula as MathML; as code where KaTeX cannot read it. */
function mathml(tex, isDisplay, { utils: { escapeHtml } }) {
  try {
    if (tex.length > MAX_CHARACTERS) throw new Error("too long");
    return katex.renderToString(tex, { output: "mathml", displayMode: isDisplay, strict: "ignore", ...LIMITS });
  } catch {
    return `<code>${escapeHtml(tex)}</code>`;
  }
}

function inlineRule(state, silent) {
  // A mark that was not found once is nowhere behind either: no second search through all of a long text.
  state.missing ??= new Set();
  const found = inlineMath(state.src.slice(0, state.posMax), state.pos, state.missing);
  if (!found) return false;
  if (!silent) {
    const token = state.push("math_inline", "math", 0);
    token.content = found.tex.trim();
    token.meta = { isDisplay: found.isDisplay };
  }
  state.pos = found.end;
  return true;
}

/** The formula that begins at `at`: {tex, isDisplay, end}, or null. */
function inlineMath(text, at, missing) {
  if (text[at] === "\\") {
    const isDisplay = text[at + 1] === "[";
    if (!isDisplay && text[at + 1] !== "(") return null;
    return between(text, at + 2, isDisplay ? "\\]" : "\\)", isDisplay, missing);
  }
  if (text[at] !== "$") return null;
  if (text[at + 1] === "$") return between(text, at + 2, "$$", true, missing);
  return dollarMath(text, at + 1);
}

function between(text, begin, mark, isDisplay, missing) {
  const stop = missing.has(mark) ? -1 : text.indexOf(mark, begin);
  if (stop < 0) missing.add(mark);
  if (stop < 0 || !text.slice(begin, stop).trim()) return null;
  return { tex: text.slice(begin, stop), isDisplay, end: stop + mark.length };
}

/** One dollar is mostly money: no space inside its pair, no digit behind it, on one line (pandoc's rules). */
function dollarMath(text, begin) {
  if (/[\s$]|^$/.test(text[begin] ?? "")) return null;
  for (let at = begin; at < text.length && text[at] !== "\n"; at++) {
    if (text[at] === "\\") at++;
    else if (text[at] === "$") {
      if (/\s/.test(text[at - 1]) || /\d/.test(text[at + 1] ?? "")) return null;
      return { tex: text.slice(begin, at), isDisplay: false, end: at + 1 };
    }
  }
  return null;
}

/** A formula that begins a line and whose end mark ends one. */
function blockRule(state, first, last, silent) {
  if (state.sCount[first] - state.blkIndent >= 4) return false;
  const line = (number) => state.src.slice(state.bMarks[number] + state.tShift[number], state.eMarks[number]).trimEnd();
  const marks = BLOCKS.find(([open]) => line(first).startsWith(open));
  if (!marks) return false;
  const parts = [];
  for (let number = first; number < last; number++) {
    if (number > first && state.sCount[number] < state.blkIndent) return false;
    const text = number === first ? line(first).slice(2) : line(number);
    if (text.endsWith(marks[1])) {
      if (!silent) pushBlock(state, [...parts, text.slice(0, -2)].join("\n"), first, number + 1);
      return true;
    }
    if (text.includes(marks[1])) return false;
    parts.push(text);
  }
  return false;
}

function pushBlock(state, tex, first, end) {
  const token = state.push("math_block", "math", 0);
  token.block = true;
  token.content = tex.trim();
  token.map = [first, end];
  state.line = end;
}

/** Code points of A, a and 0 in the alphabets that KaTeX names by `mathvariant`, which browsers no longer read. */
const ALPHABETS = {
  bold: [0x1d400, 0x1d41a, 0x1d7ce],
  "bold-italic": [0x1d468, 0x1d482],
  script: [0x1d49c, 0x1d4b6],
  fraktur: [0x1d504, 0x1d51e],
  "double-struck": [0x1d538, 0x1d552, 0x1d7d8],
  "sans-serif": [0x1d5a0, 0x1d5ba, 0x1d7e2],
  monospace: [0x1d670, 0x1d68a, 0x1d7f6],
};
/** Letters that Unicode had before those alphabets. */
const OLDER = {
  script: { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" },
  fraktur: { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" },
  "double-struck": { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" },
};

/** Writes the letters of formulas inside `root` in the alphabets that they ask for. */
export function writeAlphabets(root) {
  for (const element of root.querySelectorAll("mi[mathvariant], mn[mathvariant]")) {
    const variant = element.getAttribute("mathvariant");
    if (!ALPHABETS[variant]) continue;
    element.textContent = [...element.textContent].map((letter) => inAlphabet(letter, variant)).join("");
    element.removeAttribute("mathvariant");
  }
}

function inAlphabet(letter, variant) {
  const older = OLDER[variant]?.[letter];
  if (older) return older;
  const kind = [/[A-Z]/, /[a-z]/, /[0-9]/].findIndex((range) => range.test(letter));
  const base = ALPHABETS[variant][kind];
  return base ? String.fromCodePoint(base + letter.codePointAt(0) - "Aa0".codePointAt(kind)) : letter;
}
