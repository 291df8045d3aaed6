// Puts the parts together, and hands keys and pointers to them.
function legendEntry(colour, words) {
  const entry = document.createElement("span"), swatch = document.createElement("i");
  swatch.style.background = colour;
  entry.append(swatch, words);
  return entry;
}

function writeLegend(trace) {
  const words = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
  const seen = new Set(), entries = [];
  trace.rows.forEach((row) => row.work.forEach((event) => seen.add(trace.lanes[trace.lane[event]] === "step" ? "S" : trace.letter[event])));
  for (const [letter, word] of Object.entries({ ...words, S: "optimizer" })) {
    if (seen.has(letter)) entries.push(legendEntry(theme.colours[letter], word));
  }
  if (trace.rows.some((row) => row.chunkOf.size > 1)) entries.push(legendEntry(theme.colours["F-late"], "a later chunk"));
  entries.push(legendEntry(theme.colours["gap-line"], "idle"), legendEntry(theme.colours["gap-exposed-line"], "exposed communication"));
  if (trace.streams.some((lanes) => lanes.length)) {
    for (const [colour, word] of [["kernel", "kernels"], ["nccl", "NCCL"], ["copies", "copies"]]) entries.push(legendEntry(theme.colours[colour], word));
  }
  if (trace.rows.some((row) => row.moves.length)) entries.push(legendEntry(theme.colours["move-faint"], "moving"));
  document.getElementById("legend").replaceChildren(...entries);
}

function listenToPointer(timeline, details, view) {
  const canvas = timeline.canvas;
  let last = null, moved = 0;
  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  canvas.addEventListener("pointerdown", (event) => {
    last = event.clientX;
    moved = 0;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (last !== null) {
      const by = event.clientX - last;
      moved += Math.abs(by);
      last = event.clientX;
      if (moved > 3) {
        canvas.classList.add("dragging");
        view.move(-by / timeline.plotWidth, false);
      }
      return;
    }
    if (timeline.chosen < 0) details.say(timeline.at(...point(event)));
  });
  canvas.addEventListener("pointerup", (event) => {
    canvas.classList.remove("dragging");
    if (last !== null && moved <= 3) {
      const found = timeline.at(...point(event));
      timeline.choose(found.event, false);
      details.say(found);
    }
    last = null;
  });
  canvas.addEventListener("pointerleave", () => { if (timeline.chosen < 0) details.say({ event: -1, gap: -1 }); });
  canvas.addEventListener("dblclick", (event) => {
    const found = timeline.at(...point(event)).event;
    if (found >= 0) view.show(timeline.main.begin[found], timeline.main.end[found]);
  });
  canvas.addEventListener("wheel", (event) => {
    const [x] = point(event), place = Math.min(Math.max((x - LEFT) / timeline.plotWidth, 0), 1);
    if (event.ctrlKey || event.metaKey) view.zoom(Math.exp(event.deltaY * 0.006), place, false);
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) view.move((event.deltaX || event.deltaY) / timeline.plotWidth, false);
    else return;
    event.preventDefault();
  }, { passive: false });
}

// The instruction before or after the chosen one on its rank; with none chosen, the first in view.
function neighbour(timeline, step) {
  const trace = timeline.main, work = trace.rows[timeline.rank].work;
  if (!work.length) return -1;
  if (timeline.chosen < 0) return work[Math.min(firstEndingAfter(work, trace.end, timeline.view.from), work.length - 1)];
  return work[Math.min(Math.max(work.indexOf(timeline.chosen) + step, 0), work.length - 1)];
}

function onRank(timeline, step) {
  const trace = timeline.main, rank = Math.min(Math.max(timeline.rank + step, 0), trace.ranks - 1);
  const time = timeline.chosen < 0 ? timeline.view.from : trace.begin[timeline.chosen];
  const work = trace.rows[rank].work;
  timeline.rank = rank;
  return work.length ? work[Math.min(firstEndingAfter(work, trace.end, time), work.length - 1)] : -1;
}

function listenToKeys(timeline, details, search, view, keys) {
  const choose = (event) => { timeline.choose(event); details.say({ event, gap: -1 }); };
  const onChart = {
    ArrowLeft: () => view.move(-0.2), ArrowRight: () => view.move(0.2),
    ArrowUp: () => choose(onRank(timeline, -1)), ArrowDown: () => choose(onRank(timeline, 1)),
    ",": () => choose(neighbour(timeline, -1)), ".": () => choose(neighbour(timeline, 1)),
    Enter: () => { if (timeline.chosen >= 0) view.show(timeline.main.begin[timeline.chosen], timeline.main.end[timeline.chosen]); },
  };
  const anywhere = {
    "+": () => view.zoom(0.6), "=": () => view.zoom(0.6), "-": () => view.zoom(1 / 0.6), "0": () => view.fit(),
    "/": () => search.box.focus(), n: () => search.next(1), N: () => search.next(-1), u: keys.beneath, s: keys.streams, t: toggleTheme,
    "?": keys.help, Escape: () => { timeline.choose(-1); search.clear(); details.say({ event: -1, gap: -1 }); },
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) || document.getElementById("keys").open) return;
    const act = anywhere[event.key] || (document.activeElement === timeline.canvas && onChart[event.key]);
    if (!act) return;
    event.preventDefault();
    act();
  });
}

function fillBeneath(timeline, traces) {
  const choice = document.getElementById("beneath");
  traces.slice(1).forEach((trace, place) => choice.append(new Option(trace.label, place + 1)));
  choice.append(new Option("nothing", 0));
  choice.value = traces.length > 1 ? 1 : 0;
  const apply = () => timeline.setBeneath(Number(choice.value) ? traces[Number(choice.value)] : null);
  choice.addEventListener("change", apply);
  return () => {
    choice.selectedIndex = (choice.selectedIndex + 1) % choice.options.length;
    apply();
  };
}

// Streams are shown where there are any, until the reader hides them.
function fillStreams(timeline) {
  const choice = document.getElementById("streams");
  choice.parentElement.hidden = !timeline.hasStreams;
  choice.addEventListener("change", () => timeline.toggleStreams());
  return () => { if (timeline.hasStreams) choice.click(); };
}

function start() {
  const given = JSON.parse(document.getElementById("data").textContent);
  startTheme();
  const traces = given.traces.map((each) => readTrace(each, given.lanes, given.kinds)), main = traces[0];
  const longest = Math.max(...traces.map((trace) => (trace.length * trace.tick) / main.tick));
  const view = new View(longest);
  const timeline = new Timeline(traces, view, given.unit, given.parts);
  const details = new Details(timeline, given.unit, given.parts, given.alike);
  const search = new Search(timeline, details, given.alike);
  new Overview(timeline, view);
  new Memory(main, view, given.heldUnit);
  startCurves();
  const beneath = fillBeneath(timeline, traces), dialog = document.getElementById("keys");
  writeLegend(main);
  theme.listeners.push(() => writeLegend(main));
  listenToPointer(timeline, details, view);
  const streams = fillStreams(timeline);
  listenToKeys(timeline, details, search, view, { beneath, streams, help: () => dialog.showModal() });
  document.getElementById("help").addEventListener("click", () => dialog.showModal());
  document.getElementById("zoom-in").addEventListener("click", () => view.zoom(0.6));
  document.getElementById("zoom-out").addEventListener("click", () => view.zoom(1 / 0.6));
  document.getElementById("zoom-fit").addEventListener("click", () => view.fit());
  timeline.draw();
  window.shardwise = { timeline, view, search, drawnAfter: performance.now() };
}

start();
