// Search: instructions by their names, or all of a rank. What is not found fades.
class Search {
  constructor(timeline, details, alike) {
    this.box = document.getElementById("search");
    this.count = document.getElementById("found");
    this.timeline = timeline;
    this.details = details;
    this.alike = alike;
    this.matches = [];
    this.place = -1;
    this.box.addEventListener("input", () => this.look());
    this.box.addEventListener("keydown", (event) => {
      if (event.key === "Enter") { this.next(event.shiftKey ? -1 : 1); event.preventDefault(); }
      if (event.key === "Escape") { this.clear(); this.timeline.canvas.focus(); }
    });
  }

  clear() {
    this.box.value = "";
    this.look();
  }

  look() {
    const text = this.box.value.trim(), trace = this.timeline.main;
    this.place = -1;
    if (!text) {
      this.matches = [];
      this.timeline.found = null;
      this.count.textContent = "";
    } else {
      const test = testOf(text, trace, this.alike), found = new Set();
      trace.rows.forEach((row) => row.work.forEach((event) => { if (test(event)) found.add(event); }));
      this.matches = [...found].sort((a, b) => trace.begin[a] - trace.begin[b]);
      this.timeline.found = (event) => found.has(event);
      this.count.textContent = this.matches.length + (this.matches.length === 1 ? " found" : " found");
    }
    this.timeline.redraw();
  }

  next(step) {
    if (!this.matches.length) return;
    this.place = (this.place + step + this.matches.length) % this.matches.length;
    const event = this.matches[this.place];
    this.timeline.choose(event);
    this.details.say({ event, gap: -1 });
    this.count.textContent = this.place + 1 + " of " + this.matches.length;
  }
}

// `rank 1`, `stage 2`, `microbatch 3`; else a part of the name: `F3` is no part of `2F31`.
function testOf(text, trace, alike) {
  const place = /^(rank|stage|microbatch)\s*(\d+)$/i.exec(text);
  if (place) {
    const kind = place[1].toLowerCase(), column = trace[kind], number = Number(place[2]);
    const wanted = kind === "rank" && alike.length ? alike.findIndex((same) => same.includes(number)) : number;
    return (event) => column[event] === wanted;
  }
  const escaped = text.toUpperCase().replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  const ends = /\d$/.test(text) ? "(?!\\d)" : "", begins = /^\d/.test(text) ? "(?<!\\d)" : "";
  const pattern = new RegExp(begins + escaped + ends);
  return (event) => pattern.test(trace.names[event].toUpperCase());
}
