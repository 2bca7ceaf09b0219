// A conversation: turns as the page shows them, and told to the server as messages.
//
// A conversation is {id, title, revision, turns}. A turn is {role: "user", content, images} or
// {role: "assistant", reasoning, content, calls: [{id, name, arguments, result}], figures, problem}.
// A call's `result` is null until a person has typed one in.

const MAX_TITLE = 60;
const IMAGES = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]*$/;

/** Not crypto.randomUUID, which pages over plain http from another machine do not have. */
const newId = () => [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

export const newConversation = (turns = [], title = "") => ({ id: newId(), title, revision: 0, turns });
export const userTurn = (content, images) => ({ role: "user", content, images });
export const assistantTurn = () => ({
  role: "assistant", reasoning: "", content: "", calls: [], figures: null, problem: null,
});
export const isEmptyAnswer = ({ reasoning, content, calls }) => !reasoning && !content && !calls.length;

/** The title that was given, or the first line that was asked. */
export function titleOf({ title, turns }) {
  const first = turns.find(({ role }) => role === "user");
  const line = title || first?.content.trim().split("\n")[0] || (first?.images.length ? "Image" : "New chat");
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1)}…` : line;
}

/** Another conversation with the turns before `end`; changes of one are not seen in the other. */
export const branchOf = (conversation, end) =>
  newConversation(structuredClone(conversation.turns.slice(0, end)), `${titleOf(conversation)} (branch)`);

/** Turns read from storage, which anything may have written: parts of other types become empty, unknown turns go. */
export function checkedTurns(turns) {
  return (Array.isArray(turns) ? turns : []).flatMap((turn) => {
    if (turn?.role === "user") return [userTurn(text(turn.content), list(turn.images).filter(isImage))];
    if (turn?.role !== "assistant") return [];
    const calls = list(turn.calls).map(checkedCall);
    const problem = typeof turn.problem === "string" ? turn.problem : null;
    const parts = { reasoning: text(turn.reasoning), content: text(turn.content), calls, problem };
    return [{ ...assistantTurn(), ...parts, figures: checkedFigures(turn.figures) }];
  });
}

const text = (value) => (typeof value === "string" ? value : "");
const list = (value) => (Array.isArray(value) ? value : []);
const isImage = (url) => typeof url === "string" && IMAGES.test(url);
const checkedCall = (call) => ({
  id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments),
  result: typeof call?.result === "string" ? call.result : null,
});

function checkedFigures(figures) {
  const numbers = ["firstSeconds", "tokens", "perSecond", "cached", "accepted"];
  if (!numbers.every((name) => Number.isFinite(figures?.[name]))) return null;
  return { ...Object.fromEntries(numbers.map((name) => [name, figures[name]])), end: text(figures.end) };
}

/** The turns as messages of the chat API. An answer that failed before its first word is left out. */
export function toMessages(turns, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) messages.push(...(turn.role === "user" ? [userMessage(turn)] : assistantMessages(turn)));
  return messages;
}

function userMessage({ content, images }) {
  if (!images.length) return { role: "user", content };
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: [...parts, { type: "text", text: content }] };
}

function assistantMessages(turn) {
  if (isEmptyAnswer(turn)) return [];
  const { reasoning, content, calls } = turn;
  const message = { role: "assistant", content };
  if (reasoning) message.reasoning_content = reasoning;
  if (calls.length) message.tool_calls = calls.map(toCall);
  const answered = calls.filter((call) => call.result !== null);
  return [message, ...answered.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result }))];
}

const toCall = ({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } });

/** Adds a chunk's delta to the turn. */
export function addDelta(turn, delta) {
  turn.reasoning += delta.reasoning_content ?? "";
  turn.content += delta.content ?? "";
  for (const { index, id, function: said } of delta.tool_calls ?? []) {
    turn.calls[index] ??= { id: "", name: "", arguments: "", result: null };
    const call = turn.calls[index];
    call.id ||= id ?? "";
    call.name += said?.name ?? "";
    call.arguments += said?.arguments ?? "";
  }
}

/** Tools from the JSON that a person typed: a list of OpenAI's tools, or of the functions alone. Throws a sentence. */
export function parseTools(text) {
  if (!text.trim()) return [];
  let list;
  try {
    list = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not JSON: ${error.message}.`);
  }
  if (!Array.isArray(list)) throw new Error("The tools must be a JSON list.");
  return list.map((tool, place) => {
    const given = tool?.function ?? tool;
    if (typeof given?.name !== "string" || !given.name) throw new Error(`Tool ${place + 1} has no name.`);
    return { type: "function", function: given };
  });
}
