// A plan as it is written in the page, with what is asked of it often. Of a collective `bytes` are of one execution, `time`
// and `hidden` of all.

const COLLECTIVE = ["kind", "axes", "reduction", "type", "origin", "cause", "bytes", "times", "time", "hidden", "place", "op", "serves", "bucket", "value", "result", "flags"];
const WORDS = 6; // the first so many of a collective's fields are strings

/** A type without what is unreduced. */
const split = (type) => type.replace(/\{U:[^}]*\}/, "");

class Plan {
  constructor(data) {
    this.data = data;
    this.mesh = data.mesh;
    this.unit = data.time[3];
    this.text = data.strings;
    this.places = [];
    this.constants = []; // of kinds, whether they are
    this.names = data.names.map((n) => this.text[n]);
    this.valueCount = data.values.tensor.length;
    this.opCount = data.ops.kind.length;
    this.collectives = data.collectives.map((row, index) => this._collective(row, index));
    this.counted = this.collectives.filter((each) => each.counted && each.bytes > 0);
    this.collectiveAt = new Map(this.collectives.filter((each) => each.op >= 0).map((each) => [each.op, each]));
    this.sent = this._perOp((each) => each.bytes * each.times);
    this.sending = this._perOp((each) => each.time);
    this.users = this._users();
    this.numbers = new Map(this.names.map((name, n) => [name, n]));
    this.buffers = new Map((data.memory?.buffers ?? []).map((buffer) => [buffer[0], buffer]));
  }

  _collective(row, index) {
    const found = { index };
    COLLECTIVE.forEach((name, n) => (found[name] = n < WORDS ? this.text[row[n]] : row[n]));
    const [known, counted, again, ahead] = [1, 2, 4, 8].map((bit) => Boolean(found.flags & bit));
    return Object.assign(found, { known, counted, again, ahead, total: found.bytes * found.times });
  }

  /** The transfers of a call as the record counts them: as they run, before merging, and their bytes; of a kind, or of all. */
  transfers(kind = "") {
    const [count, unmerged, bytes] = this.data.transfers[kind] ?? [0, 0, 0];
    return { count, unmerged, bytes };
  }

  /** The same of some collectives: members of a bucket run as one. */
  transfersOf(collectives) {
    const runs = new Map(collectives.map((each) => [each.bucket >= 0 ? `bucket ${each.bucket}` : each.index, each.times]));
    const sum = (amounts) => amounts.reduce((all, each) => all + each, 0);
    return { count: sum([...runs.values()]), unmerged: sum(collectives.map((each) => each.times)), bytes: sum(collectives.map((each) => each.total)) };
  }

  /** What collectives are about, at the ops that they are, or that send by themselves. */
  _perOp(amount) {
    const found = new Float64Array(this.opCount);
    for (const each of this.counted) {
      const op = each.op >= 0 ? each.op : each.serves;
      if (op >= 0) found[op] += amount(each);
    }
    return found;
  }

  _users() {
    const found = new Map();
    this.data.ops.operands.forEach((operands, op) => {
      for (const value of operands) {
        if (!found.has(value)) found.set(value, []);
        found.get(value).push(op);
      }
    });
    return found;
  }

  // Values.

  type(value) {
    const tensor = this.data.values.tensor[value];
    return tensor === undefined ? "" : this.text[this.data.tensors[tensor][0]];
  }

  bytes(value) {
    const tensor = this.data.values.tensor[value];
    return tensor === undefined ? 0 : this.data.tensors[tensor][1];
  }

  proposed(value) {
    return this.text[this.data.values.proposed[value]] ?? "";
  }

  /** The op that makes a value, -1 for arguments. */
  maker(value) {
    return this.data.values.op[value] ?? -1;
  }

  /** Why a value has another layout than op by op: by its line and its type without axes, or its path. */
  reasonOf(value) {
    this.reasons ??= new Map(this.data.reasons.flatMap((reason) => reason[0].map((mark) => [mark.map((n) => this.text[n]).join("|"), reason])));
    const maker = this.maker(value);
    const key = maker < 0 ? `|${this.names[value]}` : `${this.place(maker).line}|${plainType(this.type(value))}`;
    return this.reasons.get(key) ?? this.reasons.get(`|${this.names[value]}`);
  }

  isChanged(value) {
    const proposed = this.proposed(value);
    return proposed !== "" && split(proposed) !== split(this.type(value));
  }

  /** Whether devices hold partial sums of it until a collective adds them. */
  isPartial(value) {
    return parsedType(this.type(value)).unreduced.length > 0;
  }

  // Ops.

  kind(op) {
    return this.text[this.data.ops.kind[op]];
  }

  isConstant(op) {
    const kind = this.data.ops.kind[op];
    return (this.constants[kind] ??= ["constant", "iota"].includes(this.shortKind(op)));
  }

  /** `dot_general` instead of `stablehlo.dot_general`. */
  shortKind(op) {
    return this.kind(op).replace(/^[a-z_]+\./, "");
  }

  place(op) {
    return this.placeOf(this.data.ops.place[op]);
  }

  placeOf(number) {
    return (this.places[number] ??= this._place(number));
  }

  _place(number) {
    const [frame, library, scope, primitive, backward, callers] = this.data.places[number];
    const words = [library, scope, primitive].map((n) => this.text[n]);
    return { ...this.frame(frame), library: words[0], scope: words[1], primitive: words[2], backward: Boolean(backward), callers };
  }

  frame(number) {
    const [line, text, inside] = this.data.frames[number].map((n) => this.text[n]);
    return { line, text, function: inside };
  }

  /** What an op computes on a device in all its executions. */
  work(op) {
    return this.data.ops.flops[op] * this.data.ops.times[op];
  }

  held(op) {
    return this.data.ops.results[op].reduce((sum, value) => sum + this.bytes(value), 0);
  }

  // The border.

  tensorType(number) {
    return this.text[this.data.tensors[number][0]];
  }

  border(side) {
    return this.data[side].map(([path, tensor, origin, stated, line, move]) => {
      const [type, bytes] = this.data.tensors[tensor];
      return { path, type: this.text[type], bytes, origin, stated, line, move };
    });
  }
}
