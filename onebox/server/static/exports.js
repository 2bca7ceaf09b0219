// A conversation as a file: Markdown to read, JSON with the messages as the API takes them.

import { titleOf, toMessages } from "./conversation.js";

export function toMarkdown(conversation) {
  const parts = [`# ${titleOf(conversation)}`];
  for (const turn of conversation.turns) parts.push(...(turn.role === "user" ? userParts(turn) : answerParts(turn)));
  return `${parts.join("\n\n")}\n`;
}

const userParts = ({ content, images }) => [
  "## You", ...images.map((url, place) => `![image ${place + 1}](${url})`), ...(content ? [content] : []),
];

function answerParts({ reasoning, content, calls }) {
  const thinking = reasoning.trim() ? [quoted(`Thinking:\n\n${reasoning.trim()}`)] : [];
  const called = calls.flatMap(({ name, arguments: text, result }) => [
    `Tool call \`${name}\`:`, fenced(text), ...(result === null ? [] : ["Result:", fenced(result)]),
  ]);
  return ["## Assistant", ...thinking, ...(content.trim() ? [content.trim()] : []), ...called];
}

const quoted = (text) => text.split("\n").map((line) => `> ${line}`.trimEnd()).join("\n");

/** In a fence that is longer than any inside. */
function fenced(text) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}\n${fence}`;
}

export function toJson(conversation, system) {
  const body = { title: titleOf(conversation), messages: toMessages(conversation.turns, system) };
  return `${JSON.stringify(body, null, 2)}\n`;
}

/** Hands a text to the browser as a file. */
export function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

/** The title as the name of a file. */
export function fileName(conversation, suffix) {
  const words = titleOf(conversation).normalize("NFKD").replace(/[^\w]+/g, "-").replace(/^-+|-+$/g, "").toLowerCase();
  return `${words || "conversation"}${suffix}`;
}
