"use strict";

// --- data: the index, and parts of the page that are unpacked when they are needed

const unpacked = new Map();

function unpack(id) {
  if (!unpacked.has(id)) {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    unpacked.set(id, new Response(stream).json());
  }
  return unpacked.get(id);
}

async function problemsOf(view) {
  const [prompts, samples] = await Promise.all([unpack(`part-${view.prompts}`), unpack(`part-${view.samples}`)]);
  return samples.map((problem, place) => ({ ...problem, prompt: prompts[place], place }));
}

const textOf = (completion) => completion.text ?? completion.tokens.join("");
const isRight = (completion) => completion.verdicts[0][1];
const disagree = (completion) => completion.verdicts.some(([, right]) => right !== isRight(completion));
const share = (problem) => problem.completions.filter(isRight).length / problem.completions.length;
const some = (test) => (problem) => problem.completions.some(test);

// Each filter sees a problem and, where two policies are compared, the same problem of the other one.
const FILTERS = {
  "": ["All", () => true],
  right: ["Right", some(isRight)],
  wrong: ["Wrong", some((c) => !isRight(c))],
  disagree: ["Graders disagree", some(disagree)],
  cut: ["Cut off", some((c) => !c.finished)],
  better: ["Better than beside", (problem, other) => other && share(problem) > share(other)],
  worse: ["Worse than beside", (problem, other) => other && share(problem) < share(other)],
};
const SHADES = ["", "surprise", "entropy"];
// Nats at which the shading is full: one chance in twenty; as uncertain as four or five equal choices.
const FULL = { surprise: 3, entropy: 1.5 };

// --- the address: #SOURCE/STEP/PROBLEM?beside=SOURCE/STEP&only=FILTER&shade=SHADE&find=TEXT

let index;
let now; // the state that the address tells, and what follows from it

// A part with a stray percent sign is read as it stands, and is then the name of nothing.
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

const sourceOf = (id) => index.sources.find((source) => source.id === id);
const splitPath = (path) => path.split("/").map((part) => (part ? decoded(part) : undefined));
const joinPath = (...parts) => parts.map(encodeURIComponent).join("/");

function viewOf(source, step) {
  const views = source.views;
  const nearest = () => {
    const trained = views.filter((view) => view.trained);
    if (!trained.length || !/^\d+$/.test(step ?? "")) return undefined;
    return trained.reduce((a, b) => (Math.abs(b.step - step) < Math.abs(a.step - step) ? b : a));
  };
  return views.find((view) => view.step === step) ?? nearest() ?? views.find((view) => !view.trained) ?? views.at(-1);
}

function defaultSource() {
  return index.sources.find((source) => source.before) ?? index.sources[0];
}

function read(hash) {
  const [path, query] = hash.replace(/^#/, "").split("?");
  const [id, step, problem] = splitPath(path);
  const asked = new URLSearchParams(query);
  const source = sourceOf(id) ?? defaultSource();
  const view = viewOf(source, step);
  const state = { source, view, problem, missing: [] };
  if (id && !sourceOf(id)) state.missing.push(`This page has no samples of ${id}.`);
  else if (step && view.step !== step) state.missing.push(`Step ${step} isn't stored; this is ${stepName(view)}.`);
  const beside = asked.get("beside");
  const [otherId, otherStep] = beside ? splitPath(beside) : [beside === null && !view.trained ? source.before : null];
  state.other = otherId ? sourceOf(otherId) : undefined;
  state.otherView = state.other && viewOf(state.other, otherStep ?? view.step);
  state.only = Object.hasOwn(FILTERS, asked.get("only") ?? "") ? asked.get("only") ?? "" : "";
  state.shade = SHADES.includes(asked.get("shade")) ? asked.get("shade") : "";
  state.find = asked.get("find") ?? "";
  return state;
}

function address(changes) {
  const to = { ...now, ...changes };
  const query = new URLSearchParams();
  const usual = !to.view.trained && to.source.before;
  const plain = to.other ? to.other.id === usual && to.otherView.step === to.view.step : !usual;
  if (!plain) query.set("beside", to.other ? joinPath(to.other.id, to.otherView.step) : "");
  for (const key of ["only", "shade", "find"]) if (to[key]) query.set(key, to[key]);
  const path = joinPath(to.source.id, to.view.step, ...(to.problem === undefined ? [] : [to.problem]));
  return `#${path}${query.size ? `?${query}` : ""}`;
}

const go = (changes) => { location.hash = address(changes); };
