// The form in which a turn is changed, in the turn's place.

import { make } from "./dom.js";

/** `later` is how many turns follow. A message is sent again or saved; an answer is saved. */
export function editForm(turn, later, { onCancel, onSave, onSend }) {
  const isMessage = turn.role === "user";
  const label = isMessage ? "Edit the message" : "Edit the answer";
  const rows = Math.min(20, turn.content.split("\n").length + 1);
  const field = make("textarea", { value: turn.content, rows, "aria-label": label });
  const button = (name, onClick, kind = "") => {
    const made = make("button", { type: "button", class: kind }, name);
    made.addEventListener("click", onClick);
    return made;
  };
  const sendName = later > 1 ? `Send again, without the ${later} turns below` : "Send again";
  const send = isMessage ? button(sendName, () => onSend(field.value.trim()), "primary") : null;
  const save = button("Save", () => onSave(field.value));
  const row = make("div", { class: "row" }, send, save, button("Cancel", onCancel));
  const form = make("article", { class: "turn edit", "aria-label": label }, field, row);
  form.addEventListener("keydown", (event) => event.key === "Escape" && onCancel());
  return form;
}
