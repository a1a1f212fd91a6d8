// The time view of a page without a browser: elements that only keep what they are given, and a canvas that says what
// is drawn on it. Reads the columns of a plan from standard input; the scripts of the page stand before this.

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], attributes: {}, listeners: {}, style: {}, dataset: {}, hidden: false, clientWidth: 1000 });
    this.classList = { add() {} };
  }
  append(...children) {
    this.children.push(...children);
  }
  replaceChildren(...children) {
    this.children = children;
  }
  setAttribute(name, value) {
    this.attributes[name] = value;
  }
  addEventListener(name, listener) {
    this.listeners[name] = listener;
  }
  get text() {
    return this.children.map((child) => (child instanceof Element ? child.text : String(child))).join(" ");
  }
  getContext() {
    return pen;
  }
}

const drawn = { boxes: [], texts: [], paths: 0 };
const pen = {
  scale() {},
  fillRect(x, y, width, height) {
    drawn.boxes.push([this.fillStyle.trim(), x, y, width, height]);
  },
  strokeRect() {},
  fillText(text, x, y) {
    drawn.texts.push([text, x, y, this.textAlign]);
  },
  beginPath() {},
  moveTo() {},
  lineTo() {
    drawn.paths += 1;
  },
  fill() {},
};

function runs(columns, main) {
  app.plan = new Plan(columns);
  const view = new Element("div");
  showTime(view);
  main(view);
}
