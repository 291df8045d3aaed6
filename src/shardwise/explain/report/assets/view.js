// Which stretch of time is shown, and how it changes: at once while dragging, in a short glide after a key.
const GLIDE_MS = 160;

class View {
  constructor(length) {
    this.length = length;
    this.from = 0;
    this.to = length;
    this.least = Math.max(length / 2e6, 1);
    this.listeners = [];
    this.frame = 0;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
  }

  get width() { return this.to - this.from; }

  set(from, to) {
    const width = Math.min(Math.max(to - from, this.least), this.length);
    this.from = Math.min(Math.max(from + (to - from - width) / 2, 0), this.length - width);
    this.to = this.from + width;
    for (const listener of this.listeners) listener();
  }

  glide(from, to) {
    cancelAnimationFrame(this.frame);
    if (this.still.matches) return this.set(from, to);
    const start = performance.now(), before = [this.from, this.to];
    const tick = (now) => {
      const share = Math.min((now - start) / GLIDE_MS, 1), eased = 1 - (1 - share) ** 3;
      this.set(before[0] + (from - before[0]) * eased, before[1] + (to - before[1]) * eased);
      if (share < 1) this.frame = requestAnimationFrame(tick);
    };
    this.frame = requestAnimationFrame(tick);
  }

  // Zoom about a place in the view, 0 at its left and 1 at its right.
  zoom(factor, place = 0.5, glides = true) {
    const width = Math.min(Math.max(this.width * factor, this.least), this.length);
    const from = this.from + (this.width - width) * place;
    if (glides) this.glide(from, from + width); else this.set(from, from + width);
  }

  move(share, glides = true) {
    const by = Math.min(Math.max(share * this.width, -this.from), this.length - this.to);
    if (glides) this.glide(this.from + by, this.to + by); else this.set(this.from + by, this.to + by);
  }

  fit() { this.glide(0, this.length); }

  show(from, to) {
    const room = (to - from) * 6;
    this.glide(Math.max((from + to - room) / 2, 0), Math.min((from + to + room) / 2, this.length));
  }

  reveal(from, to) {
    if (from >= this.from && to <= this.to) return;
    const width = Math.max(this.width, (to - from) * 1.2), middle = (from + to) / 2;
    this.glide(middle - width / 2, middle + width / 2);
  }
}

// A canvas as wide as its place, sharp on any screen. Returns a context in CSS pixels.
function sharpen(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = height + "px";
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
