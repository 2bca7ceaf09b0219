// What a person sees before the first message: something to begin with, and where else the model can be reached.

import { byId, make } from "./dom.js";

const EXAMPLES = [
  "Explain how a hash table works, with a small example in Python.",
  "Compare TCP and UDP in a table.",
  "Derive the quadratic formula, step by step.",
];
const POCKET = "pocket";
/** What the pocket model was trained for; the others it answers with nonsense. */
const POCKET_EXAMPLES = [
  "What can you do?",
  "What is the capital of France?",
  "What is 17 + 25?",
];

function offer(examples) {
  const buttons = examples.map((text) => {
    const button = make("button", { type: "button" }, text);
    button.addEventListener("click", () => {
      byId("message").value = text;
      byId("message").focus();
    });
    return make("li", {}, button);
  });
  byId("examples").replaceChildren(...buttons);
}

export function startHints() {
  offer(EXAMPLES);
  const address = new URL("v1", document.baseURI).href;
  byId("api-address").textContent = address;
  byId("chat-command").textContent = `onebox chat --url ${new URL(".", document.baseURI).href.replace(/\/$/, "")}`;
}

/** `model` as the server describes it. */
export function describeModel(model) {
  const sees = model.input_modalities?.includes("image");
  byId("hint-images").hidden = !sees;
  byId("hint-pocket").hidden = model.root !== POCKET;
  if (model.root === POCKET) offer(POCKET_EXAMPLES);
}
