// What is said of the chosen instruction, or of what the pointer is at.
class Details {
  constructor(timeline, unit, parts, alike) {
    this.place = document.getElementById("details");
    this.timeline = timeline;
    this.unit = unit;
    this.parts = parts;
    this.alike = alike;
    this.say({ event: -1, gap: -1 });
  }

  say({ event, gap, activity }) {
    this.place.replaceChildren();
    if (event >= 0) this.sayEvent(event);
    else if (activity) this.sayActivity(activity);
    else if (gap >= 0) this.sayGap(gap);
    else this.write("Point at a box, or choose one with the comma and full stop keys.");
  }

  write(text, kind) {
    const node = document.createElement(kind || "span");
    node.textContent = text;
    this.place.append(node);
  }

  span(trace, begin, end) {
    const tick = trace.tick;
    return timeText(begin * tick, this.unit) + " to " + timeText(end * tick, this.unit);
  }

  sayEvent(event) {
    const trace = this.timeline.main, seconds = (trace.end[event] - trace.begin[event]) * trace.tick;
    this.write(trace.names[event], "code");
    this.write("  " + meaningOf(trace, event) + ", " + this.rankText(trace.rank[event]) + ": ");
    this.write(timeText(seconds, this.unit), "b");
    this.write(", from " + this.span(trace, trace.begin[event], trace.end[event]));
    const other = this.timeline.beneath;
    if (other) this.write(this.compare(other, trace.rank[event], trace.names[event], seconds));
    const before = this.gapsBefore(trace, event);
    if (before.length) {
      this.place.append(document.createElement("br"));
      this.write("before it " + before.map((gap) => this.gapText(trace, gap)).join("; "));
    }
  }

  // A rank of the trace, or all that do what it does: `ranks 32 to 63`, `32 ranks, 0, 16, 32 ... 496`.
  rankText(rank) {
    const same = this.alike[rank];
    if (!same || same.length === 1) return "rank " + (same ? same[0] : rank);
    const last = same[same.length - 1];
    if (last - same[0] === same.length - 1) return "ranks " + same[0] + " to " + last;
    return same.length + " ranks, " + same.slice(0, 3).join(", ") + (same.length > 4 ? " ... " : ", ") + last;
  }

  compare(other, rank, name, seconds) {
    const found = findEvent(other, rank, name);
    if (found === undefined) return "";
    const then = (other.end[found] - other.begin[found]) * other.tick;
    const change = then > 0 ? " (" + (seconds >= then ? "+" : "\u2212") + Math.abs((seconds / then - 1) * 100).toFixed(0) + "\u2009%)" : "";
    return "; " + other.label + " " + timeText(then, this.unit) + change;
  }

  // The stretches in which the rank stood still, one after the other, up to an event.
  gapsBefore(trace, event) {
    const gaps = trace.rows[trace.rank[event]].gaps, found = [];
    let time = trace.begin[event], place = firstEndingAfter(gaps, trace.gaps.end, time - 3);
    while (place >= 0 && place < gaps.length && Math.abs(trace.gaps.end[gaps[place]] - time) <= 2) {
      found.unshift(gaps[place]);
      time = trace.gaps.begin[gaps[place]];
      place -= 1;
    }
    return found.slice(-4);
  }

  gapText(trace, gap) {
    const part = this.parts[trace.gaps.part[gap]].name, on = trace.reasons[trace.gaps.on[gap]];
    const length = timeText((trace.gaps.end[gap] - trace.gaps.begin[gap]) * trace.tick, this.unit);
    const whom = on ? ", for " + on : "";
    return part + " " + length + whom;
  }

  sayActivity({ lane, place }) {
    const trace = this.timeline.main, text = (column) => lane.texts[lane[column][place]];
    const seconds = (lane.end[place] - lane.begin[place]) * trace.tick;
    this.write(text("name"), "code");
    this.write("  " + text("word") + (text("instruction") ? " of " + text("instruction") : "") + ", rank " + lane.rank + ", stream " + lane.stream + " (" + lane.role + "): ");
    this.write(timeText(seconds, this.unit), "b");
    this.write(", from " + this.span(trace, lane.begin[place], lane.end[place]));
    const launched = lane.launched[place];
    if (launched !== NEVER) this.write("; launched " + timeText(Math.max(lane.begin[place] - launched, 0) * trace.tick, this.unit) + " before");
  }

  sayGap(gap) {
    const trace = this.timeline.main;
    this.write("rank " + trace.gaps.rank[gap] + ": ");
    this.write(this.gapText(trace, gap), "b");
    this.write(", from " + this.span(trace, trace.gaps.begin[gap], trace.gaps.end[gap]));
  }
}
