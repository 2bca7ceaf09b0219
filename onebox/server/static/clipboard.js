// Copying, also where a page over plain http from another machine has no clipboard of its own.

import { make } from "./dom.js";

/** Whether the text is on the clipboard now. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyByCommand(text);
  }
}

/** The way from before `navigator.clipboard`, which needs https: what a field has selected is copied. */
function copyByCommand(text) {
  const field = make("textarea", { value: text, readOnly: true, class: "unseen", "aria-hidden": "true" });
  const before = document.activeElement;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  before?.focus({ preventScroll: true });
  return isCopied;
}

/** A button that copies what `read` gives, and says whether it did. */
export function copyButton(read, title) {
  const button = make("button", { type: "button", title }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copyText(read())) ? "Copied" : "Not copied";
  });
  button.addEventListener("blur", () => (button.textContent = "Copy"));
  return button;
}
