// Images for the next message: chosen, pasted or dropped, shown above the message until it is sent.

import { byId, make, say } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
let attached = [];
let canSee = false;

/** Whether the served model reads images. */
export function allowImages(isAllowed) {
  canSee = isAllowed;
  byId("attach").hidden = !isAllowed;
}

export function setAttached(urls) {
  attached = [...urls];
  show();
}

/** The attached images as data URLs; none are left. */
export function takeAttached() {
  const urls = attached;
  setAttached([]);
  return urls;
}

export const hasAttached = () => attached.length > 0;

async function attach(files) {
  const problem = refusal([...files]);
  say(byId("notice"), problem);
  if (problem) return;
  attached.push(...(await Promise.all([...files].map(readDataUrl))));
  show();
}

function refusal(files) {
  if (!canSee) return "This model reads no images.";
  const other = files.find(({ type }) => !TYPES.includes(type));
  return other ? `${other.name || "The file"} is no PNG, JPEG, WebP or GIF image; only those can be attached.` : null;
}

function readDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

function show() {
  const items = attached.map((url, place) => {
    const remove = make("button", { type: "button", "aria-label": `Remove image ${place + 1}` }, "×");
    remove.addEventListener("click", () => setAttached(attached.toSpliced(place, 1)));
    return make("li", {}, make("img", { src: url, alt: `image ${place + 1}` }), remove);
  });
  byId("attached").replaceChildren(...items);
  byId("attached").hidden = !items.length;
}

const hasFiles = ({ dataTransfer }) => Boolean(dataTransfer?.types.includes("Files"));

/** Files are taken from the button, from the clipboard, and wherever on the page they are dropped. */
export function startImages() {
  byId("images").addEventListener("change", async (event) => {
    await attach(event.target.files);
    event.target.value = "";
  });
  byId("message").addEventListener("paste", (event) => {
    // A copied table or page is text with a picture of it beside: the text is meant.
    const { files, types } = event.clipboardData;
    if (!files.length || types.includes("text/plain")) return;
    event.preventDefault();
    attach(files);
  });
  for (const kind of ["dragenter", "dragover"]) {
    document.addEventListener(kind, (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      document.body.classList.add("dropping");
    });
  }
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dropping");
  });
  document.addEventListener("drop", (event) => {
    document.body.classList.remove("dropping");
    if (!hasFiles(event)) return;
    // Otherwise the browser leaves the page to show the file.
    event.preventDefault();
    attach(event.dataTransfer.files);
  });
}
