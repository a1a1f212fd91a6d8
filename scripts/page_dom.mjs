// A page without a browser: elements that keep what they are given and find each other by simple selectors, and a canvas
// that says what is drawn on it. The scripts of the page stand behind this.

class Element {
  constructor(tag) {
    Object.assign(this, { tag, childNodes: [], parentNode: null, attributes: {}, listeners: {}, dataset: {}, hidden: false, value: "" });
    Object.assign(this, { clientWidth: 1000, clientHeight: 600, scrollTop: 0, offsetTop: 0, id: "", namespaceURI: "" });
    this.style = { cssText: "" };
    this.classes = new Set();
    this.classList = { add: (name) => this.classes.add(name), contains: (name) => this.classes.has(name) };
  }
  get children() {
    return this.childNodes.filter((child) => child instanceof Element);
  }
  append(...added) {
    for (const child of added) if (child instanceof Element) child.parentNode = this;
    this.childNodes.push(...added);
  }
  replaceChildren(...children) {
    this.childNodes = [];
    this.append(...children);
  }
  replaceWith(...others) {
    for (const other of others) if (other instanceof Element) other.parentNode = this.parentNode;
    this.parentNode.childNodes.splice(this.parentNode.childNodes.indexOf(this), 1, ...others);
  }
  remove() {
    this.replaceWith();
  }
  setAttribute(name, value) {
    this.attributes[name] = String(value);
    if (name === "id") known.set((this.id = value), this);
    if (name === "class") String(value).split(/\s+/).forEach((each) => each && this.classes.add(each));
    if (name === "value") this.value = value;
    if (name.startsWith("data-")) this.dataset[name.slice(5)] = String(value);
  }
  getAttribute(name) {
    return this.attributes[name] ?? null;
  }
  removeAttribute(name) {
    delete this.attributes[name];
  }
  addEventListener(name, listener) {
    this.listeners[name] = listener;
  }
  matches(selector) {
    return selector.split(",").some((each) => {
      const [, tag, rest] = /^([\w-]*)(.*)$/.exec(each.trim().split(/\s+/).at(-1));
      const parts = rest.match(/\.[\w-]+|\[[^\]]+\]/g) ?? [];
      const fits = (part) => {
        if (part.startsWith(".")) return this.classes.has(part.slice(1));
        const [name, value] = part.slice(1, -1).split("=");
        return value === undefined ? name in this.attributes : this.attributes[name] === value.replace(/['"]/g, "");
      };
      return (!tag || tag === this.tag) && parts.every(fits);
    });
  }
  querySelectorAll(selector) {
    return this.children.flatMap((child) => [...(child.matches(selector) ? [child] : []), ...child.querySelectorAll(selector)]);
  }
  querySelector(selector) {
    return this.querySelectorAll(selector)[0] ?? null;
  }
  closest(selector) {
    return this.matches(selector) ? this : (this.parentNode?.closest(selector) ?? null);
  }
  click() {
    (this.onclick ?? this.listeners.click)?.({ target: this, preventDefault() {} });
  }
  getBoundingClientRect() {
    return { left: 0, top: 0, width: this.clientWidth, height: this.clientHeight };
  }
  getContext() {
    return pen;
  }
  focus() {}
  scrollIntoView() {}
  showModal() {}
  get text() {
    return this.childNodes.map((child) => (child instanceof Element ? child.text : String(child))).join(" ");
  }
}

const drawn = { boxes: [], texts: [] };
const pen = {
  scale() {},
  fillRect(x, y, width, height) {
    drawn.boxes.push([this.fillStyle.trim(), x, y, width, height, this.globalAlpha ?? 1]);
  },
  strokeRect() {},
  fillText(text, x, y) {
    drawn.texts.push([text, x, y, this.textAlign, this.fillStyle.trim()]);
  },
};

const known = new Map();
globalThis.document = {
  getElementById: (id) => {
    if (!known.has(id)) known.set(id, Object.assign(new Element("div"), { id }));
    return known.get(id);
  },
  createElement: (tag) => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
  addEventListener() {},
  documentElement: new Element("html"),
};
document.getElementById("metric").append(Object.assign(new Element("option"), { attributes: { value: "time" } }));
globalThis.window = { devicePixelRatio: 1, innerHeight: 768 };
globalThis.ResizeObserver = class {
  observe() {}
};
globalThis.requestAnimationFrame = (draw) => {
  draw();
  return 0;
};
globalThis.matchMedia = () => ({ matches: false, addEventListener() {} });
/** A colour is the variable that it is given by. */
globalThis.getComputedStyle = (node) => ({ color: /^var\((.*)\)$/.exec(node.style.color)[1] });
