"use strict";
// Timeline of a page: one band per rank, with the threads of the trace.
window.addEventListener("error", (event) => { document.body.dataset.error = event.message; });

const COLOURS = ["#4c78dd", "#e8833a", "#3fa66b", "#b25fc9", "#d9517a", "#2fa7b8", "#b3912b", "#7a6bd8",
                 "#8a9a3b", "#c4665a", "#4f8f8b", "#9a6b3f"];
const WAIT = "#9aa3b2", SPAN = "#c7cedb";
const ROW = 17, GAP = 2, BAND = 12, AXIS = 26, GUTTER = 130;

const trace = JSON.parse(document.getElementById("trace").textContent);
const byId = (id) => document.getElementById(id);
const canvas = byId("canvas"), tip = byId("tip");
const hidden = new Set();
let bands = [], events = [], last = 1, from = 0, to = 1, height = 0, pointed = null, held = null;

const duration = (us) => {
  if (us >= 1e6) return `${(us / 1e6).toPrecision(4)} s`;
  if (us >= 1e3) return `${(us / 1e3).toPrecision(4)} ms`;
  return `${Number(us.toPrecision(4))} us`;
};
const size = (bytes) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < 4) { bytes /= 1024; unit += 1; }
  return `${Number(bytes.toPrecision(4))} ${units[unit]}`;
};

function element(name, text, parent) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

// Reading ------------------------------------------------------------------------------------

function read() {
  const ranks = new Map();
  const rank = (pid) => {
    if (!ranks.has(pid)) ranks.set(pid, {pid, name: `rank ${pid}`, threads: new Map()});
    return ranks.get(pid);
  };
  const thread = (event) => {
    const threads = rank(event.pid).threads;
    if (!threads.has(event.tid)) threads.set(event.tid, {name: "", events: [], depth: 1, open: []});
    return threads.get(event.tid);
  };
  for (const event of trace.traceEvents) {
    if (event.name === "process_name") rank(event.pid).name = event.args.name;
    else if (event.name === "thread_name" && event.ph === "M") thread(event).name = event.args.name;
    else if (event.ph === "X") place(thread(event), event);
  }
  bands = [...ranks.values()].sort((a, b) => a.pid - b.pid);
  last = events.reduce((most, event) => Math.max(most, event.ts + event.dur), 1);
}

// Events of a thread are in the order of their starts; a nested event is one row lower.
function place(thread, event) {
  while (thread.open.length && thread.open.at(-1).ts + thread.open.at(-1).dur <= event.ts) thread.open.pop();
  const parent = thread.open.at(-1);
  event.row = event.cat === "late" ? Math.max(0, thread.open.length - 1) : thread.open.length;
  event.parent = event.cat === "late" ? parent : undefined;
  if (event.cat !== "late") thread.open.push(event);
  thread.depth = Math.max(thread.depth, event.row + 1);
  thread.events.push(event);
  events.push(event);
}

function layOut() {
  let top = AXIS;
  for (const band of bands) {
    band.top = top;
    top += BAND / 2;
    for (const thread of band.threads.values()) {
      thread.top = top;
      top += thread.depth * ROW + GAP;
    }
    top += BAND / 2;
    band.bottom = top;
  }
  height = top + 4;
}

// Colours ------------------------------------------------------------------------------------

const verbs = new Map();
function colour(event) {
  if (event.cat === "wait") return WAIT;
  if (event.cat === "span") return SPAN;
  return verbs.get(event.name);
}
function kind(event) {
  if (event.cat === "wait") return "Work.wait";
  return event.cat === "span" ? "span" : event.name;
}

// Drawing ------------------------------------------------------------------------------------

const width = () => canvas.clientWidth - GUTTER - 12;
const x = (us) => GUTTER + ((us - from) / (to - from)) * width();
const time = (px) => from + ((px - GUTTER) / width()) * (to - from);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

function draw() {
  const ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const ink = {fore: css("--fore"), dim: css("--dim"), line: css("--line"), panel: css("--panel")};
  drawAxis(pen, ink);
  bands.forEach((band, index) => drawBand(pen, ink, band, index));
  document.body.dataset.from = from;
  document.body.dataset.to = to;
}

function drawAxis(pen, ink) {
  const step = niceStep((to - from) / Math.max(2, width() / 110));
  pen.fillStyle = ink.dim;
  pen.strokeStyle = ink.line;
  pen.textAlign = "center";
  pen.beginPath();
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
    const px = Math.round(x(at)) + 0.5;
    pen.moveTo(px, AXIS - 5);
    pen.lineTo(px, height);
    pen.fillText(at === 0 ? "0" : duration(Number(at.toPrecision(12))), px, AXIS / 2);
  }
  pen.stroke();
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= least) || 10 * power;
}

function drawBand(pen, ink, band, index) {
  if (index % 2 === 0) {
    pen.globalAlpha = 0.55;
    pen.fillStyle = ink.panel;
    pen.fillRect(0, band.top, canvas.clientWidth, band.bottom - band.top);
    pen.globalAlpha = 1;
  }
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, band.top, width(), band.bottom - band.top);
  pen.clip();
  for (const thread of band.threads.values()) drawThread(pen, thread);
  pen.restore();
  pen.textAlign = "left";
  const [title] = band.name.split(" (");
  for (const [index, thread] of [...band.threads.values()].entries()) {
    pen.fillStyle = index === 0 ? ink.fore : ink.dim;
    pen.fillText(index === 0 ? title : thread.name, 20, thread.top + ROW / 2);
  }
}

function drawThread(pen, thread) {
  const filled = new Map();  // painted width of each row; crowded events cost one stroke per pixel
  for (const event of thread.events) {
    const end = event.ts + event.dur;
    if (end < from || event.ts > to || hidden.has(kind(event.parent || event))) continue;
    const left = Math.max(GUTTER - 2, x(event.ts)), right = Math.min(GUTTER + width() + 2, x(end));
    const key = `${event.cat === "late"} ${event.row}`;
    if (right < (filled.get(key) ?? -1)) continue;
    const wide = Math.max(1, right - left);
    filled.set(key, left + wide);
    drawEvent(pen, event, left, thread.top + event.row * ROW, wide);
  }
}

function drawEvent(pen, event, left, top, wide) {
  if (event.cat === "late") {
    pen.fillStyle = "rgba(255, 255, 255, .5)";
    pen.fillRect(left, top + 1, wide, ROW - 3);
    return;
  }
  pen.fillStyle = colour(event);
  pen.globalAlpha = hasPointed(event) || !pointed ? 1 : 0.6;
  pen.fillRect(left, top, wide, ROW - 1);
  if (event === pointed || isSameCall(event)) {
    pen.strokeStyle = css("--fore");
    pen.strokeRect(left + 0.5, top + 0.5, Math.max(1, wide - 1), ROW - 2);
  }
  pen.globalAlpha = 1;
  if (wide > 44) {
    pen.fillStyle = event.cat === "span" || event.cat === "wait" ? "#1d2433" : "#ffffff";
    pen.textAlign = "left";
    pen.save();
    pen.beginPath();
    pen.rect(left, top, wide - 4, ROW);
    pen.clip();
    pen.fillText(event.name, left + 5, top + ROW / 2);
    pen.restore();
  }
}

// Whether an event is the pointed call on another rank.
function isSameCall(event) {
  const one = pointed && pointed.args, other = event.args;
  return Boolean(one && one.number && event.cat === "collective" && one.number === other.number &&
                 one.group === other.group);
}
const hasPointed = (event) => event === pointed || isSameCall(event) || event.cat === "span";

// Pointing, zooming, panning -----------------------------------------------------------------

function under(px, py) {
  if (px < GUTTER) return null;
  for (const band of bands) {
    if (py < band.top || py > band.bottom) continue;
    for (const thread of band.threads.values()) {
      const row = Math.floor((py - thread.top) / ROW);
      if (row < 0 || row >= thread.depth) continue;
      const slack = (to - from) / width();
      const near = thread.events.filter((event) => event.row === row && event.cat !== "late" &&
        !hidden.has(kind(event)) && x(event.ts) <= px + 1 && x(event.ts + event.dur) + 1 >= px);
      return near.sort((a, b) => Math.abs(a.ts - time(px)) - Math.abs(b.ts - time(px)))[0] || null;
    }
  }
  return null;
}

function show(event, px, py) {
  tip.style.display = event ? "block" : "none";
  if (!event) return;
  const args = event.args, rows = [["took", duration(event.dur)], ["from", duration(event.ts)]];
  if (args.waited_us) rows.push(["waited", `${duration(args.waited_us)} for rank ${args.waited_for_rank}`]);
  if (args.bytes !== undefined) rows.push(["bytes", size(args.bytes)]);
  if (args.bytes && event.dur) rows.push(["rate", `${size(args.bytes / event.dur * 1e6)}/s`]);
  if (args.line) rows.push(["line", args.via ? `${args.line}, through ${args.via}` : args.line]);
  if (args.group) rows.push(["group", args.number ? `${args.group}, call ${args.number}` : args.group]);
  if (args.running) rows.push(["state", "had not ended"]);
  if (args.error) rows.push(["error", args.error]);
  tip.replaceChildren();
  element("b", args.call || event.name, tip);
  const list = element("dl", undefined, tip);
  for (const [name, value] of rows) { element("dt", name, list); element("dd", value, list); }
  tip.style.left = `${Math.min(px + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
  const below = py + 18;
  tip.style.top = `${below + tip.offsetHeight > window.innerHeight ? py - tip.offsetHeight - 10 : below}px`;
}

function look(start, end) {
  const least = 0.05;
  let wide = Math.min(Math.max(end - start, least), last * 1.02);
  from = Math.min(Math.max(start, -last * 0.01), last * 1.01 - wide);
  to = from + wide;
  draw();
}
function zoom(factor, centre = (from + to) / 2) {
  look(centre - (centre - from) * factor, centre + (to - centre) * factor);
}
const fit = () => look(-last * 0.01, last * 1.01);

canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
    const by = ((event.deltaX || event.deltaY) / width()) * (to - from);
    look(from + by, to + by);
  } else zoom(1.0015 ** event.deltaY, time(event.offsetX));
}, {passive: false});
canvas.addEventListener("pointerdown", (event) => {
  held = {x: event.offsetX, from, to};
  canvas.setPointerCapture(event.pointerId);
  canvas.classList.add("held");
});
canvas.addEventListener("pointerup", () => { held = null; canvas.classList.remove("held"); });
canvas.addEventListener("pointermove", (event) => {
  if (held) {
    const by = ((held.x - event.offsetX) / width()) * (held.to - held.from);
    look(held.from + by, held.to + by);
    return;
  }
  const found = under(event.offsetX, event.offsetY);
  if (found !== pointed) { pointed = found; draw(); }
  show(found, event.clientX, event.clientY);
});
canvas.addEventListener("pointerleave", () => { pointed = null; show(null); draw(); });
canvas.addEventListener("dblclick", (event) => {
  const found = under(event.offsetX, event.offsetY);
  if (found) look(found.ts - found.dur * 0.2, found.ts + found.dur * 1.2);
});
window.addEventListener("keydown", (event) => {
  const by = (to - from) * 0.15;
  const keys = {w: () => zoom(0.7), "+": () => zoom(0.7), s: () => zoom(1.4), "-": () => zoom(1.4), 0: fit,
                a: () => look(from - by, to - by), d: () => look(from + by, to + by)};
  keys.ArrowLeft = keys.a;
  keys.ArrowRight = keys.d;
  if (keys[event.key] && !event.ctrlKey && !event.metaKey) keys[event.key]();
});
window.addEventListener("resize", draw);
byId("closer").onclick = () => zoom(0.6);
byId("wider").onclick = () => zoom(1.7);
byId("fit").onclick = fit;

// Legend and tables --------------------------------------------------------------------------

function swatch(parent, shade) { element("i", undefined, parent).style.background = shade; }

function makeLegend() {
  const legend = byId("legend");
  const kinds = [...verbs, ["Work.wait", WAIT], ["span", SPAN]];
  for (const [name, shade] of kinds.filter(([name]) => events.some((e) => kind(e) === name))) {
    const button = element("button", undefined, legend);
    swatch(button, shade);
    button.append(name);
    button.onclick = () => {
      if (!hidden.delete(name)) hidden.add(name);
      button.classList.toggle("off");
      draw();
    };
  }
  const help = element("span", "pale: waits for the last rank. Wheel zooms, drag pans, double-click shows one", legend);
  help.className = "help";
}

function table(title, heads, rows) {
  const part = element("section", undefined, byId("tables"));
  element("h2", title, part);
  const made = element("table", undefined, part), head = element("tr", undefined, element("thead", undefined, made));
  for (const text of heads) element("th", text, head);
  const body = element("tbody", undefined, made);
  for (const [shade, ...cells] of rows) {
    const row = element("tr", undefined, body);
    for (const text of cells) element("td", text, row);
    if (shade) {
      const mark = document.createElement("i");
      mark.style.background = shade;
      row.firstChild.prepend(mark);
    }
  }
}

function makeTables() {
  const total = new Map();
  const ranks = trace.otherData.summary;
  for (const {verbs: own} of ranks) {
    for (const [name, verb] of Object.entries(own)) {
      const sum = total.get(name) || {calls: 0, bytes: 0, us: 0, waited_us: 0};
      for (const key of Object.keys(sum)) sum[key] += verb[key];
      total.set(name, sum);
    }
  }
  const rows = [...total].sort((a, b) => b[1].us - a[1].us);
  table("Verbs, all ranks", ["", "calls", "bytes", "time", "waiting for a rank", "longest"], rows.map(([name, v]) => [
    verbs.get(name), name, v.calls, size(v.bytes), duration(v.us), duration(v.waited_us),
    duration(events.reduce((most, e) => e.name === name ? Math.max(most, e.dur) : most, 0))]));
  table("Ranks", ["", "communication", "program blocked", "overlapped"], ranks.map((r) => [
    null, bands.find((band) => band.pid === r.rank).name, duration(r.communication_us), duration(r.blocked_us),
    `${duration(r.overlapped_us)} (${Math.round(100 * r.overlapped_us / (r.communication_us || 1))} %)`]));
}

read();
for (const event of events) {
  if ((event.cat === "collective" || event.cat === "message") && !verbs.has(event.name)) {
    verbs.set(event.name, COLOURS[verbs.size % COLOURS.length]);
  }
}
layOut();
makeLegend();
makeTables();
byId("facts").textContent =
  `${bands.length} rank${bands.length === 1 ? "" : "s"}, ${events.filter((e) => e.cat !== "late").length} events, ${duration(last)}`;
fit();
document.body.dataset.events = events.length;
