// What a person set, kept in this browser; the API key only until the tab is closed.

import { byId, say } from "./dom.js";
import { parseTools } from "./conversation.js";

const STORE = "onebox.settings";
/** Numbers of the request by the id of their field; empty ones are the model's own. */
const NUMBERS = {
  temperature: "temperature",
  "top-p": "top_p",
  "top-k": "top_k",
  "min-p": "min_p",
  "presence-penalty": "presence_penalty",
  "frequency-penalty": "frequency_penalty",
  "repetition-penalty": "repetition_penalty",
  seed: "seed",
  "max-tokens": "max_tokens",
  "thinking-budget": "thinking_budget",
};
const FIELDS = ["system", "thinking", "tools", ...Object.keys(NUMBERS)];

const read = (field) => (field.type === "checkbox" ? field.checked : field.value);
const write = (field, value) => (field.type === "checkbox" ? (field.checked = value) : (field.value = value));

/** Fills the fields with what was kept, and keeps them from now on. `onKey` is called when the API key has changed. */
export function startSettings(onKey) {
  for (const [name, value] of Object.entries(kept())) {
    if (FIELDS.includes(name)) write(byId(name), value);
  }
  byId("api-key").value = sessionStorage.getItem("onebox.key") ?? "";
  byId("api-key").addEventListener("change", () => {
    sessionStorage.setItem("onebox.key", apiKey());
    onKey();
  });
  byId("settings").addEventListener("change", keep);
  byId("reset-settings").addEventListener("click", reset);
  byId("tools").addEventListener("input", showToolsProblem);
  showToolsProblem();
}

export const apiKey = () => byId("api-key").value.trim();
export const systemPrompt = () => byId("system").value.trim();

/** The request's fields that settings decide. Throws a sentence where a number or the tools cannot be read. */
export function requestFields() {
  const doesThink = byId("thinking").checked;
  const fields = { chat_template_kwargs: { enable_thinking: doesThink } };
  for (const [id, name] of Object.entries(NUMBERS)) {
    const field = byId(id);
    if (!field.checkValidity()) throw new Error(`${field.labels[0].innerText.trim()}: ${field.validationMessage}`);
    if (field.value && (doesThink || id !== "thinking-budget")) fields[name] = field.valueAsNumber;
  }
  const tools = parseTools(byId("tools").value);
  if (tools.length) fields.tools = tools;
  return fields;
}

function kept() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    return {};
  }
}

function keep() {
  const values = Object.fromEntries(FIELDS.map((name) => [name, read(byId(name))]));
  try {
    localStorage.setItem(STORE, JSON.stringify(values));
  } catch {
    say(byId("tools-problem"), "This browser has no room to keep the settings; they hold until the tab is closed.");
  }
}

/** Back to the model's own sampling; the system prompt and the tools stay. */
function reset() {
  for (const id of Object.keys(NUMBERS)) byId(id).value = "";
  byId("thinking").checked = true;
  keep();
}

function showToolsProblem() {
  try {
    parseTools(byId("tools").value);
    say(byId("tools-problem"), null);
  } catch (error) {
    say(byId("tools-problem"), error.message);
  }
}
