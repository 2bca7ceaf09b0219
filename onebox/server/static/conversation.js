// The conversation: turns as the page shows them, kept in this browser, and told to the server as messages.
//
// A turn is {role: "user", content, images} or
// {role: "assistant", reasoning, content, calls: [{id, name, arguments, result}], figures, problem}.
// A call's `result` is null until a person has typed one in.

const STORE = "onebox.conversation";

export const userTurn = (content, images) => ({ role: "user", content, images });
export const assistantTurn = () => ({
  role: "assistant", reasoning: "", content: "", calls: [], figures: null, problem: null,
});

/** The turns that this browser kept, or none. */
export function loadTurns() {
  try {
    const turns = JSON.parse(localStorage.getItem(STORE)) ?? [];
    return turns.every((turn) => ["user", "assistant"].includes(turn.role)) ? turns : [];
  } catch {
    return [];
  }
}

/** Keeps the turns. Images can be larger than the browser's room: then they are left out, and false says so. */
export function saveTurns(turns) {
  try {
    localStorage.setItem(STORE, JSON.stringify(turns));
    return true;
  } catch {
    const slim = turns.map((turn) => (turn.images ? { ...turn, images: [] } : turn));
    try {
      localStorage.setItem(STORE, JSON.stringify(slim));
    } catch {
      localStorage.removeItem(STORE);
    }
    return false;
  }
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

function assistantMessages({ reasoning, content, calls }) {
  if (!reasoning && !content && !calls.length) return [];
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
