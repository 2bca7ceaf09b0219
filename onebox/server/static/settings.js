// What a person set, kept in this browser; the API key only until the tab is closed.

import { byId, say } from "./dom.js";
import { parseTools } from "./conversation.js";

const STORE = "onebox.settings";
const FIELDS = ["system", "temperature", "max-tokens", "thinking", "tools"];

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
  byId("tools").addEventListener("input", showToolsProblem);
  showToolsProblem();
}

export const apiKey = () => byId("api-key").value.trim();
export const systemPrompt = () => byId("system").value.trim();

/** The request's fields that settings decide. Throws a sentence where the tools cannot be read. */
export function requestFields() {
  const fields = { chat_template_kwargs: { enable_thinking: byId("thinking").checked } };
  if (byId("temperature").value) fields.temperature = byId("temperature").valueAsNumber;
  if (byId("max-tokens").value) fields.max_tokens = byId("max-tokens").valueAsNumber;
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
  localStorage.setItem(STORE, JSON.stringify(Object.fromEntries(FIELDS.map((name) => [name, read(byId(name))]))));
}

function showToolsProblem() {
  try {
    parseTools(byId("tools").value);
    say(byId("tools-problem"), null);
  } catch (error) {
    say(byId("tools-problem"), error.message);
  }
}
