// The chart of all ranks: for each a row of what it did, a strip of what it moved, and beneath it another trace.
let LEFT = 84;
const RIGHT = 10, AXIS = 24;

class Timeline {
  constructor(traces, view, unit, parts) {
    this.canvas = document.getElementById("chart");
    this.scroll = document.getElementById("rows");
    this.main = traces[0];
    this.names = this.main.rankNames;
    LEFT = Math.max(LEFT, 20 + 6.3 * Math.max(...this.names.map((name) => name.length)));
    this.traces = traces;
    this.view = view;
    this.unit = unit;
    this.parts = parts;
    this.beneath = traces.length > 1 ? traces[1] : null;
    this.hasStreams = this.main.streams.some((lanes) => lanes.length);
    this.showsStreams = this.hasStreams;
    this.chosen = -1;
    this.rank = 0;
    this.found = null;
    this.pending = 0;
    this.measure();
    view.listeners.push(() => this.redraw());
    theme.listeners.push(() => { this.hatches = null; this.redraw(); });
    this.scroll.addEventListener("scroll", () => this.redraw(), { passive: true });
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
  }

  measure() {
    const many = this.main.ranks > 24;
    this.box = many ? 13 : 22;
    this.strip = this.main.rows.some((row) => row.moves.length) ? (many ? 3 : 4) : 0;
    this.under = this.beneath ? (many ? 6 : 9) : 0;
    this.lane = many ? 5 : 10;
    this.numLanes = this.showsStreams ? Math.max(...this.main.streams.map((lanes) => lanes.length)) : 0;
    this.lanesAt = this.box + (this.strip ? this.strip + 1 : 0) + (this.under ? this.under + 2 : 0) + (this.numLanes ? 3 : 0);
    this.pitch = this.lanesAt + this.numLanes * (this.lane + 2) + (many ? 5 : 9);
    this.height = AXIS + this.main.ranks * this.pitch + 2;
  }

  setBeneath(trace) {
    this.beneath = trace;
    this.measure();
    this.redraw();
  }

  toggleStreams() {
    this.showsStreams = this.hasStreams && !this.showsStreams;
    this.measure();
    this.redraw();
  }

  laneTop(rank, number) { return this.rowTop(rank) + this.lanesAt + number * (this.lane + 2); }

  redraw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => { this.pending = 0; this.draw(); });
  }

  get plotWidth() { return Math.max(this.canvas.clientWidth - LEFT - RIGHT, 40); }

  rowTop(rank) { return AXIS + rank * this.pitch; }

  x(time) { return LEFT + ((time - this.view.from) * this.plotWidth) / this.view.width; }

  time(x) { return this.view.from + ((x - LEFT) * this.view.width) / this.plotWidth; }

  draw() {
    const context = sharpen(this.canvas, this.height), colours = theme.colours;
    context.clearRect(0, 0, this.canvas.clientWidth, this.height);
    this.hatches ||= this.makeHatches(context);
    const top = this.scroll.scrollTop, bottom = top + this.scroll.clientHeight;
    const first = Math.max(0, Math.floor((top - AXIS) / this.pitch));
    const last = Math.min(this.main.ranks - 1, Math.floor((bottom - AXIS) / this.pitch));
    this.drawAxis(context, Math.max(top, 0));
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, this.plotWidth, this.height);
    context.clip();
    for (let rank = first; rank <= last; rank++) this.drawRank(context, rank);
    this.drawChosen(context);
    context.restore();
    context.font = "12px ui-sans-serif, system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let rank = first; rank <= last; rank++) {
      context.fillStyle = rank === this.rank && this.chosen >= 0 ? colours.ink : colours.faint;
      context.fillText(this.names[rank], LEFT - 10, this.rowTop(rank) + this.box / 2 + 0.5);
    }
    if (this.numLanes) this.drawLaneNames(context, first, last);
    this.drawnAt = performance.now();
  }

  drawRank(context, rank) {
    const area = { x: LEFT, y: this.rowTop(rank), width: this.plotWidth, height: this.box };
    drawGaps(context, this.main, rank, this.view, area, this.hatches);
    drawWork(context, this.main, rank, this.view, area, { labels: true, isFound: this.found });
    // Where its GPU was seen, a rank stands still inside of instructions too: at the foot of their boxes.
    if (this.main.streams[rank].length) drawGaps(context, this.main, rank, this.view, { ...area, y: area.y + this.box - 6, height: 6 }, this.hatches);
    let y = area.y + this.box + 1;
    if (this.strip) {
      this.drawMoves(context, rank, y);
      y += this.strip + 1;
    }
    if (this.under && rank < this.beneath.ranks) {
      context.globalAlpha = 0.62;
      drawWork(context, this.beneath, rank, this.inOther(this.beneath), { ...area, y, height: this.under }, {});
      context.globalAlpha = 1;
    }
    if (!this.numLanes) return;
    this.main.streams[rank].forEach((lane, number) => {
      drawLane(context, lane, this.view, { ...area, y: this.laneTop(rank, number), height: this.lane });
    });
  }

  drawLaneNames(context, first, last) {
    context.font = (this.lane < 10 ? 7 : 9.5) + "px ui-sans-serif, system-ui, sans-serif";
    context.fillStyle = theme.colours.faint;
    for (let rank = first; rank <= last; rank++) {
      this.main.streams[rank].forEach((lane, number) => {
        context.fillText(lane.role + " " + lane.stream, LEFT - 10, this.laneTop(rank, number) + this.lane / 2 + 0.5);
      });
    }
  }

  // The view in the ticks of another trace: both begin at the left, and a second is as long.
  inOther(other) {
    const factor = this.main.tick / other.tick;
    const from = this.view.from * factor, to = this.view.to * factor;
    return { from, to, width: to - from };
  }

  drawMoves(context, rank, y) {
    const trace = this.main, list = trace.rows[rank].moves, scale = this.plotWidth / this.view.width;
    context.fillStyle = theme.colours["move-faint"];
    let reached = -1;
    for (const event of list) {
      if (trace.begin[event] >= this.view.to) break;
      if (trace.end[event] <= this.view.from) continue;
      const left = Math.max(LEFT + (trace.begin[event] - this.view.from) * scale, reached);
      const right = LEFT + (trace.end[event] - this.view.from) * scale;
      if (right - left < 0.3) continue;
      context.fillRect(left, y, Math.max(right - left, 0.8), this.strip);
      reached = right;
    }
  }

  drawAxis(context, y) {
    const colours = theme.colours, tick = this.main.tick;
    const step = roundStep((this.view.width * tick * 90) / this.plotWidth) / tick;
    context.font = "11px ui-sans-serif, system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "top";
    for (let time = Math.ceil(this.view.from / step) * step; time <= this.view.to; time += step) {
      const x = Math.round(this.x(time)) + 0.5;
      context.strokeStyle = colours.rule;
      context.beginPath();
      context.moveTo(x, y + 17);
      context.lineTo(x, this.height);
      context.stroke();
      context.fillStyle = colours.faint;
      context.fillText(timeText(time * tick, this.unit), Math.min(x, LEFT + this.plotWidth - 16), y + 2);
    }
  }

  drawChosen(context) {
    const event = this.chosen, trace = this.main;
    if (event < 0) return;
    const x = this.x(trace.begin[event]), wide = Math.max(this.x(trace.end[event]) - x, 2);
    context.strokeStyle = theme.colours.ink;
    context.lineWidth = 1.6;
    context.strokeRect(x - 0.5, this.rowTop(trace.rank[event]) - 1.5, wide + 1, this.box + 3);
    context.lineWidth = 1;
    for (const [from, to] of linksOf(trace, event)) this.drawLink(context, from, to);
  }

  drawLink(context, from, to) {
    const trace = this.main, down = trace.rank[to] > trace.rank[from];
    context.strokeStyle = theme.colours.move;
    context.beginPath();
    context.moveTo(this.x(trace.end[from]), this.rowTop(trace.rank[from]) + (down ? this.box : 0));
    context.lineTo(this.x(trace.begin[to]), this.rowTop(trace.rank[to]) + (down ? 0 : this.box));
    context.stroke();
  }

  makeHatches(context) {
    const colours = theme.colours;
    const idle = makeHatch(context, colours.gap, colours["gap-line"]);
    const exposed = makeHatch(context, colours["gap-exposed"], colours["gap-exposed-line"]);
    const bytes = ["exposed", "copies"];
    return this.parts.map((part) => (bytes.includes(part.key) ? exposed : part.key === "data" ? colours.data : idle));
  }

  // The event, the gap or what a stream did at a point of the canvas.
  at(x, y) {
    const rank = Math.floor((y - AXIS) / this.pitch), time = this.time(x), trace = this.main;
    if (rank < 0 || rank >= trace.ranks || x < LEFT) return { event: -1, gap: -1 };
    const number = Math.floor((y - this.laneTop(rank, 0)) / (this.lane + 2));
    if (this.numLanes && number >= 0) {
      const lane = trace.streams[rank][number];
      return { event: -1, gap: -1, activity: lane ? activityAt(lane, time) : null };
    }
    const row = trace.rows[rank], place = firstEndingAfter(row.work, trace.end, time);
    if (place < row.work.length && trace.begin[row.work[place]] <= time) return { event: row.work[place], gap: -1 };
    const gap = row.gaps[firstEndingAfter(row.gaps, trace.gaps.end, time)];
    return { event: -1, gap: gap !== undefined && trace.gaps.begin[gap] <= time ? gap : -1 };
  }

  choose(event, reveals = true) {
    this.chosen = event;
    if (event >= 0) {
      this.rank = this.main.rank[event];
      if (reveals) {
        this.view.reveal(this.main.begin[event], this.main.end[event]);
        this.showRank(this.rank);
      }
    }
    this.redraw();
  }

  showRank(rank) {
    const top = this.rowTop(rank), scroll = this.scroll;
    if (top < scroll.scrollTop + AXIS) scroll.scrollTop = top - AXIS;
    else if (top + this.pitch > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = top + this.pitch - scroll.clientHeight;
  }
}

// What gave an event its input and what took its output, on other ranks.
function linksOf(trace, event) {
  const links = [], stage = trace.stage[event], microbatch = trace.microbatch[event], letter = trace.letter[event];
  const ahead = letter === "F" ? 1 : -1;
  if (!"FBI".includes(letter)) return links;
  for (const [other, isSource] of [[stage - ahead, true], [stage + ahead, false]]) {
    const found = findWork(trace, other, letter, microbatch);
    if (found >= 0 && trace.rank[found] !== trace.rank[event]) links.push(isSource ? [found, event] : [event, found]);
  }
  return links;
}

function findWork(trace, stage, letter, microbatch) {
  trace.works ||= new Map(trace.names.map((name, event) => [name, event]));
  for (const each of letter === "F" ? ["F"] : ["B", "I"]) {
    const found = trace.works.get(stage + each + microbatch);
    if (found !== undefined) return found;
  }
  return -1;
}
