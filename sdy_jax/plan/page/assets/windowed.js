// Lists of any length: only the rows that can be seen are there.

class Windowed {
  /**
   * Fills a box that scrolls.
   * @param box the element; it keeps the keyboard's focus, and says which row is active.
   * @param how `height` of a row, `row(entry, index)` to make one, `role` of the box and `rowRole`, `label`; and, all of
   *   them optional, `choose(entry)`, `move(entry, key)` for keys other than those that go up and down, `head` to stay
   *   at the top.
   */
  constructor(box, how) {
    Object.assign(this, { box, how, entries: [], active: -1 });
    this.space = el("div", { class: "space", role: "presentation" });
    box.classList.add("windowed");
    box.setAttribute("role", how.role);
    box.setAttribute("aria-label", how.label);
    box.tabIndex = 0;
    box.replaceChildren(...(how.head ? [how.head] : []), this.space);
    box.onscroll = () => this.draw();
    box.onkeydown = (event) => this._key(event);
    new ResizeObserver(() => this.draw()).observe(box);
  }

  show(entries) {
    this.entries = entries;
    this.active = Math.min(this.active, entries.length - 1);
    this.space.style.height = `${entries.length * this.how.height}px`;
    this.drawn = null;
    this.draw();
  }

  draw() {
    const { height } = this.how;
    const first = Math.max(0, Math.floor(this.box.scrollTop / height) - 8);
    const last = Math.min(this.entries.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / height) + 8);
    const drawn = `${first} ${last}`;
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    this.space.replaceChildren(...this.entries.slice(first, last).map((entry, n) => this._row(entry, first + n)));
    this._point();
  }

  _row(entry, index) {
    const row = this.how.row(entry, index);
    row.classList.add("row");
    row.style.top = `${index * this.how.height}px`;
    row.style.height = `${this.how.height}px`;
    row.id = `${this.box.id}-${index}`;
    row.setAttribute("role", this.how.rowRole);
    if (index === this.active) row.classList.add("active");
    row.addEventListener("click", () => {
      this.active = index;
      this.redraw();
      this.how.choose?.(entry, true);
    });
    return row;
  }

  redraw() {
    this.drawn = null;
    this.draw();
  }

  _point() {
    const row = byId(`${this.box.id}-${this.active}`);
    if (row) this.box.setAttribute("aria-activedescendant", row.id);
    else this.box.removeAttribute("aria-activedescendant");
  }

  /** Makes an entry the active one, and scrolls to it. */
  activate(index) {
    this.active = Math.max(0, Math.min(index, this.entries.length - 1));
    const { height } = this.how;
    const top = this.active * height;
    const shown = this.box.clientHeight - this.space.offsetTop;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + height > this.box.scrollTop + shown) this.box.scrollTop = top + height - shown;
    this.redraw();
  }

  _key(event) {
    if (event.target !== this.box || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.box.clientHeight / this.how.height) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    const entry = this.entries[this.active];
    if (event.key in moves) {
      this.activate(this.active + moves[event.key]);
      this.how.choose?.(this.entries[this.active], false);
    } else if (event.key === "Enter" || event.key === " ") {
      if (entry) this.how.choose?.(entry, true);
    } else if (!(entry && this.how.move?.(entry, event.key))) {
      return;
    }
    event.preventDefault();
  }
}
