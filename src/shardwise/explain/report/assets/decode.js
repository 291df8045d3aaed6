// What the page was given: columns of numbers as base64, made into typed arrays once.
function bytesOf(text) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let at = 0; at < raw.length; at++) bytes[at] = raw.charCodeAt(at);
  return bytes.buffer;
}

const KINDS = { u8: Uint8Array, u16: Uint16Array, i16: Int16Array, u32: Uint32Array, i32: Int32Array, f32: Float32Array };

function columnsOf(packed) {
  const columns = {};
  for (const [name, [kind, text]] of Object.entries(packed)) columns[name] = new KINDS[kind](bytesOf(text));
  return columns;
}

// Events of one trace. Times are in ticks, `tick` seconds each, from the trace's start.
function readTrace(given, lanes, kinds) {
  const trace = { ...given, ...columnsOf(given.columns), names: given.names.split("\n"), lanes };
  trace.streams = readStreams(given, kinds);
  trace.count = trace.begin.length;
  trace.letter = trace.names.map(letterOf);
  trace.rows = Array.from({ length: given.ranks }, () => ({ work: [], moves: [], gaps: [] }));
  for (let event = 0; event < trace.count; event++) {
    const lane = lanes[trace.lane[event]], row = trace.rows[trace.rank[event]];
    if (lane === "compute" || lane === "step") row.work.push(event);
    else if (lane === "recompute") continue;
    else if (trace.end[event] > trace.begin[event]) row.moves.push(event);
  }
  const byBegin = (a, b) => trace.begin[a] - trace.begin[b];
  for (const row of trace.rows) {
    row.work.sort(byBegin);
    row.moves.sort(byBegin);
    row.chunkOf = chunksOf(trace, row.work);
  }
  paint(trace);
  trace.gaps = columnsOf(given.gaps);
  trace.reasons = given.reasons.split("\n");
  for (let gap = 0; gap < trace.gaps.begin.length; gap++) trace.rows[trace.gaps.rank[gap]].gaps.push(gap);
  trace.held = given.held.map((curve) => ({ ...curve, ...columnsOf(curve.columns) }));
  return trace;
}

// The colours of boxes. Even places are a rank's first chunk, odd ones its later chunks.
const PAINTS = ["F", "F-late", "B", "B-late", "I", "I-late", "W", "W-late", "S", "S-late", "other", "other-late"];

function paintOf(letter, isLate) {
  const place = "FBIWS".indexOf(letter);
  return 2 * (place < 0 ? 5 : place) + (isLate ? 1 : 0);
}

// For every event the place of its colour in PAINTS; of the second half of an overlapped pair too, 255 for none, and
// its microbatch.
function paint(trace) {
  trace.paint = new Uint8Array(trace.count);
  trace.second = new Uint8Array(trace.count).fill(255);
  trace.secondMicrobatch = new Map();
  for (const row of trace.rows) {
    for (const event of row.work) {
      const letter = trace.lanes[trace.lane[event]] === "step" ? "S" : trace.letter[event], name = trace.names[event];
      trace.paint[event] = paintOf(letter, (row.chunkOf.get(trace.stage[event]) || 0) > 0);
      const cut = name.indexOf("&");
      if (cut > 0) {
        const other = name.slice(cut + 1);
        trace.second[event] = paintOf(letterOf(other), (row.chunkOf.get(parseInt(other, 10)) || 0) > 0);
        trace.secondMicrobatch.set(event, other.replace(/^\d+\D+/, ""));
      }
    }
  }
}

// An event of a rank by its name; undefined if there is none.
function findEvent(trace, rank, name) {
  trace.byName ||= new Map(trace.names.map((each, event) => [trace.rank[event] + " " + each, event]));
  return trace.byName.get(rank + " " + name);
}

// The letter of an instruction's kind: `F` of `2F0`, `S` of `2SEND_F0>1` and of `2STEP0`.
function letterOf(name) {
  for (let at = 0; at < name.length; at++) {
    const code = name.charCodeAt(at);
    if (code < 48 || code > 57) return name[at];
  }
  return "?";
}

// For the stages of a rank, which of its chunks each is: 0 for the first, up to 1 for the last.
function chunksOf(trace, work) {
  const stages = [...new Set(work.map((event) => trace.stage[event]))].sort((a, b) => a - b);
  return new Map(stages.map((stage, place) => [stage, stages.length > 1 ? place / (stages.length - 1) : 0]));
}

// The first of a row's events that ends after a time: events of a row do not overlap.
function firstEndingAfter(events, ends, time) {
  let low = 0, high = events.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[events[middle]] > time) high = middle; else low = middle + 1;
  }
  return low;
}
