// What stands above a block of code: its language, and a button that copies it.

import { copyButton } from "./clipboard.js";
import { make } from "./dom.js";

/** `read` gives the code of the moment. */
export function codeHead(language, read) {
  return make("div", { class: "code-head" }, make("span", {}, language || "code"), copyButton(read, "Copy the code"));
}
