// Numbers and instructions as a person reads them.
const UNITS = [["s", 1], ["ms", 1e-3], ["\u00b5s", 1e-6], ["ns", 1e-9]];

function digits(value) {
  if (value === 0) return "0";
  return String(Number(value.toPrecision(Math.abs(value) >= 1000 ? 4 : 3)));
}

function timeText(seconds, unit) {
  if (unit !== "s") return digits(seconds) + (unit ? "\u2009" + unit : "");
  if (seconds === 0) return "0 s";
  const [name, size] = UNITS.find(([, each]) => Math.abs(seconds) >= each) || UNITS[3];
  return digits(seconds / size) + "\u2009" + name;
}

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];

function heldText(value, unit) {
  if (unit !== "B") return digits(value) + "\u2009" + unit;
  let place = 0;
  while (Math.abs(value) >= 1024 && place < BYTES.length - 1) { value /= 1024; place += 1; }
  return (place ? value.toFixed(1) : Math.round(value)) + "\u2009" + BYTES[place];
}

const MEANINGS = {
  F: "forward", B: "backward", I: "input gradient", W: "weight gradient",
};

function meaningOf(trace, event) {
  const lane = trace.lanes[trace.lane[event]], stage = trace.stage[event], microbatch = trace.microbatch[event];
  const place = "microbatch " + microbatch + " on stage " + stage;
  if (lane === "step") return "the optimizer's step";
  if (lane === "send") return "sends what microbatch " + microbatch + " has on stage " + stage + " to " + trace.rankNames[trace.peer[event]];
  if (lane === "receive") return "waits for what " + trace.rankNames[trace.peer[event]] + " sends of microbatch " + microbatch;
  if (lane === "wait") return "waits";
  if (lane === "collective") return "moves beside the computation";
  if (lane === "data") return "waits for the batch";
  const parts = trace.names[event].split("&");
  if (parts.length > 1) return "a forward and a backward at once";
  return (MEANINGS[trace.letter[event]] || trace.names[event]) + " of " + place;
}

// The next of 1, 2, 5, 10, 20, 50 ... that is not less.
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * 0.999999);
}
