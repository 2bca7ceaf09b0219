// Elements from words. Text is always set as text: only markdown.js parses HTML, and cleans it first.

export const byId = (id) => document.getElementById(id);

/** An element with properties (`class` and `aria-*` too) and children; a string child is text, null is left out. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class" || name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** An SVG element with attributes and children. */
export function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Shows a sentence in an element, or hides the element when there is none. */
export function say(element, sentence) {
  element.textContent = sentence ?? "";
  element.hidden = !sentence;
}

/** Shows a sentence with a button that does something about it once; the next one takes its place. */
export function offer(sentence, label, action) {
  const button = make("button", { type: "button" }, label);
  const place = byId("offer");
  button.addEventListener("click", () => {
    place.hidden = true;
    action();
  });
  place.replaceChildren(sentence, " ", button);
  place.hidden = false;
}
