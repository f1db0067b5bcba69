// What the page of samples shows and does. Its data and addresses are in samples_data.js, which comes before.

// --- elements

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== undefined && child !== ""));
  return made;
}

const byId = (id) => document.getElementById(id);
const stepName = (view) => (view.trained ? `step ${view.step}` : view.step);
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "none");
const number = (value) => value === null ? "none" : String(Math.round(value * 1000) / 1000).replace("-", "−");

// Characters that are invisible or turn the direction of text around get a label, and act within it only.
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

function withLabels(text) {
  const pieces = [];
  let end = 0;
  for (const match of text.matchAll(CONTROL)) {
    const name = `U+${match[0].charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
    pieces.push(text.slice(end, match.index), element("bdi", { "data-name": name }, match[0]));
    end = match.index + match[0].length;
  }
  return [...pieces, text.slice(end)];
}

function shadedToken(completion, place, shade) {
  const [logprob, entropy] = [completion.logprobs[place], completion.entropies[place]];
  const level = (shade === "surprise" ? -logprob : entropy) / FULL[shade];
  const told = `probability ${number(Math.exp(logprob))}, surprise ${number(-logprob)} nats, entropy ${number(entropy)} nats`;
  const style = level >= 0.02 ? `--level:${(Math.min(level, 1) * 0.62).toFixed(2)}` : undefined;
  return element("span", { title: told, style }, ...withLabels(completion.tokens[place]));
}

// The tokens of one turn, from begin to end, which the policy drew.
function turnPieces(completion, begin, end, shade) {
  const tokens = completion.tokens.slice(begin, end);
  return shade ? tokens.flatMap((token, place) => (token ? [shadedToken(completion, begin + place, shade)] : [])) : withLabels(tokens.join(""));
}

function textElement(completion) {
  const shade = completion.tokens && now.shade;
  const read = completion.verdicts[0][2] ?? undefined; // what the grader took for the answer
  const block = (shading, ...pieces) => element("pre", { class: `text ${shading}`, dir: "auto", "data-read": read }, ...pieces);
  if (!completion.tokens) return block("", ...withLabels(textOf(completion)));
  const pieces = [];
  let begin = 0;
  for (const [from, to] of completion.replies) {
    pieces.push(...turnPieces(completion, begin, from, shade));
    const title = "a reply of the environment, from which nothing is learned";
    pieces.push(element("span", { class: "reply", title }, ...withLabels(completion.tokens.slice(from, to).join(""))));
    begin = to;
  }
  pieces.push(...turnPieces(completion, begin, completion.tokens.length, shade));
  return block(shade ? `shaded ${shade}` : "", ...pieces);
}

// --- a problem

function why(completion, gold) {
  const [, right, extracted] = completion.verdicts[0];
  if (right) return "";
  if (extracted === null || extracted === undefined)
    return completion.finished ? "states no answer that the grader reads" : "cut off before it stated an answer";
  return extracted === gold ? `reads ${extracted}, but not as an answer of the expected form` : `reads ${extracted}, expects ${gold}`;
}

function verdictFacts([grader, right, extracted]) {
  const told = element("dd", {}, element("span", { class: right ? "right" : "wrong" }, right ? "✓ right" : "✗ wrong"));
  if (extracted === null) told.append(", read no answer");
  else if (extracted !== undefined) told.append(", read ", element("q", {}, ...withLabels(extracted)));
  return [element("dt", {}, grader), told];
}

function rewardFacts(completion) {
  if (completion.reward === undefined) return [];
  const parts = Object.entries(completion.parts).map(([name, value]) => `${name} ${number(value)}`);
  const facts = [element("dt", {}, "reward"), element("dd", {}, `${number(completion.reward)} (${parts.join(", ")})`)];
  if (completion.advantage !== null) facts.push(element("dt", {}, "advantage"), element("dd", {}, number(completion.advantage)));
  return facts;
}

function completionElement(completion, gold) {
  const right = isRight(completion);
  const turns = completion.replies?.length ? `${completion.replies.length + 1} turns, ` : "";
  const size = `${turns}${completion.length} token${completion.length === 1 ? "" : "s"}${completion.finished ? "" : ", cut off"}`;
  const text = textElement(completion);
  const more = element("button", { type: "button", hidden: true, onclick: () => { more.hidden = text.classList.toggle("whole"); } }, "Show all of it");
  requestAnimationFrame(() => { more.hidden = text.scrollHeight <= text.clientHeight; });
  return element(
    "section",
    { class: "completion" },
    element(
      "header",
      {},
      element("span", { class: `verdict ${right ? "right" : "wrong"}` }, right ? "✓ Right" : "✗ Wrong"),
      element("bdi", { class: "why" }, ...withLabels(why(completion, gold))),
      element("span", { class: "muted" }, size),
    ),
    text,
    more,
    element("dl", { class: "facts" }, ...completion.verdicts.flatMap(verdictFacts), ...rewardFacts(completion)),
  );
}

function columnElement(source, view, problem, question) {
  const right = problem?.completions.filter(isRight).length;
  const score = problem ? `${right} of ${problem.completions.length} right` : "";
  const before = source.id === now.source.before && "before training, ";
  const after = source.before && "after training, ";
  const when = view.trained ? `step ${view.step} of training` : `${before || after || ""}${view.step}`;
  const head = element(
    "header",
    {},
    element("h3", {}, source.id),
    element("p", { class: "muted" }, [when, score].filter(Boolean).join(" · ")),
  );
  if (!problem) return element("section", { class: "column" }, head, element("p", { class: "muted" }, "This problem isn't among its samples."));
  const completions = problem.completions.map((completion) => completionElement(completion, problem.gold));
  return element("section", { class: "column" }, head, ...(question ? [questionElement(problem)] : []), ...completions);
}

function questionElement(problem) {
  return element(
    "div",
    {},
    element("pre", { class: "text question-text", dir: "auto" }, ...withLabels(problem.prompt)),
    element("p", { class: "expected" }, element("span", { class: "muted" }, "Expected answer "), element("bdi", {}, element("b", {}, ...withLabels(problem.gold)))),
  );
}

function shadeLegend(problems) {
  if (!now.shade) return "";
  if (!problems.some((problem) => problem?.completions[0]?.tokens))
    return element("span", { class: "legend" }, "Evaluations store no probabilities of tokens; steps of training do.");
  return element("span", { class: `legend shaded ${now.shade}` }, "0", element("i"), `${FULL[now.shade]} nats`);
}

function showProblem() {
  const { problem, partner } = now.shown;
  const target = byId("problem");
  const notices = now.missing.map((text) => element("p", { class: "notice" }, text));
  if (!problem) {
    const none = now.find || now.only ? "No problem here passes the filter and the search." : "There are no samples here.";
    target.replaceChildren(...notices, element("p", { class: "muted" }, none));
    return;
  }
  const place = now.listed.indexOf(problem);
  const page = (step, sign, name) => {
    const to = now.listed[place + step];
    return element("button", { type: "button", title: `${name} problem`, "aria-label": `${name} problem`, disabled: !to || place < 0, onclick: () => go({ problem: to.id }) }, sign);
  };
  const back = element("button", { type: "button", class: "to-list", onclick: () => go({ problem: undefined }) }, "‹ Problems");
  const title = element(
    "div",
    { class: "title" },
    back,
    element("h2", {}, `Problem ${problem.place + 1}`),
    element("bdi", { class: "muted" }, `${problem.id} · ${stepName(now.view)}`),
    shadeLegend([problem, partner]),
    element("span", { class: "pager" }, page(-1, "‹", "Previous"), page(1, "›", "Next")),
  );
  const same = !now.other || !partner || partner.prompt === problem.prompt;
  const columns = [columnElement(now.source, now.view, problem, !same)];
  if (now.other) columns.unshift(columnElement(now.other, now.otherView, partner, !same));
  const body = now.other ? element("div", { class: "columns" }, ...columns) : aloneElement(columns[0]);
  target.replaceChildren(title, ...notices, ...(same ? [questionElement(problem)] : []), body);
  target.scrollTop = 0;
  for (const prompt of target.querySelectorAll(".question-text")) prompt.scrollTop = prompt.scrollHeight; // the question comes last
  highlight();
}

function aloneElement(column) {
  const completions = [...column.querySelectorAll(":scope > .completion")];
  column.append(element("div", { class: "alone" }, ...completions));
  return element("div", { class: "columns" }, column);
}

// --- the list

// What all prompts begin with, such as a template or solved examples, tells no two of them apart.
function commonStart(texts) {
  let length = texts.length > 1 ? texts[0].length : 0;
  for (const text of texts) while (!text.startsWith(texts[0].slice(0, length))) length -= 1;
  return texts[0]?.slice(0, length).replace(/\S+$/, "").length ?? 0;
}

const snippet = (prompt) => prompt.slice(now.start).replace(/<\|[^|]*\|>/g, " ").replace(/\s+/g, " ").trim();

function marks(problem, most) {
  const { completions } = problem;
  if (completions.length > most) return [element("small", {}, `${completions.filter(isRight).length}/${completions.length}`)];
  return completions.map((completion) => element("i", { class: isRight(completion) ? "right" : "" }));
}

function partnerOf(problem) {
  if (!now.otherProblems) return undefined;
  const found = now.otherById.get(problem.id);
  if (found && found.gold === problem.gold) return found;
  // Two steps of training share no problem, so they are read side by side by place.
  return now.shared ? undefined : now.otherProblems[problem.place];
}

function matches(problem, words) {
  if (!words) return true;
  const texts = [problem, now.partners.get(problem)].filter(Boolean).flatMap((one) => [
    one.id, one.prompt, one.gold, ...one.completions.flatMap((c) => [textOf(c), ...c.verdicts.map(([, , extracted]) => extracted ?? "")]),
  ]);
  return texts.some((text) => text.toLowerCase().includes(words));
}

function listItem(problem) {
  const partner = now.partners.get(problem);
  const told = partner ? [...marks(partner, 4), element("i", { class: "sep" }), ...marks(problem, 4)] : marks(problem, 8);
  return element(
    "a",
    { href: address({ problem: problem.id }), "aria-current": problem === now.shown.problem && "true" },
    element("span", { class: "number" }, String(problem.place + 1)),
    element("bdi", { class: "question" }, snippet(problem.prompt)),
    element("span", { class: "marks", "aria-hidden": "true" }, ...told),
  );
}

function showList() {
  const list = byId("problems");
  const { view } = now;
  const cut = now.problems.flatMap((problem) => problem.completions).filter((completion) => !completion.finished).length;
  const stored = view.problems < view.stored ? `, of ${view.stored} stored` : "";
  const about = `${now.source.about}. ${view.problems} problems${stored}, ${percent(view.right, view.completions)} of ${view.completions} completions right${cut ? `, ${cut} cut off` : ""}.`;
  list.replaceChildren(element("p", {}, about), ...now.listed.map(listItem));
  if (now.listed.length < now.problems.length)
    list.append(element("p", {}, `${now.listed.length} of ${now.problems.length} problems pass.`));
  if (now.problem !== undefined) list.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
}

// --- the head

function options(select, values, chosen) {
  select.replaceChildren(...values.map(([value, text]) => element("option", { value, selected: value === chosen }, text)));
}

function stepOptions(select, source, chosen) {
  const groups = [["Rollouts of training", source.views.filter((v) => v.trained)], ["Evaluation", source.views.filter((v) => !v.trained)]];
  select.replaceChildren(
    ...groups.filter(([, views]) => views.length).map(([label, views]) => element(
      "optgroup",
      { label },
      ...views.map((view) => element("option", { value: view.step, selected: view === chosen }, [stepName(view), percent(view.right, view.completions), ...(view.trained ? [`reward ${number(view.reward)}`] : [])].join(" · "))),
    )),
  );
}

function showHead() {
  const ids = index.sources.map((source) => [source.id, source.id]);
  options(byId("source"), ids, now.source.id);
  stepOptions(byId("step"), now.source, now.view);
  options(byId("other"), [["", "nothing"], ...ids], now.other?.id ?? "");
  byId("other-step").hidden = !now.other;
  if (now.other) stepOptions(byId("other-step"), now.other, now.otherView);
  byId("shade").value = now.shade;
  if (document.activeElement !== byId("find")) byId("find").value = now.find;
  byId("filters").replaceChildren(...usefulFilters().map((key) => element(
    "button",
    { type: "button", "aria-pressed": String(key === now.only), onclick: () => go({ only: key, problem: undefined }) },
    `${FILTERS[key][0]} `,
    element("b", {}, String(now.counts[key])),
  )));
}

const usefulFilters = () => Object.keys(FILTERS).filter((key) => now.counts[key] || key === now.only || key === "");

function highlight() {
  if (!CSS.highlights) return;
  const blocks = [...document.querySelectorAll("#problem .text")];
  const marked = blocks.flatMap((block) => (block.dataset.read ? rangesIn(block, block.dataset.read).slice(-1) : []));
  CSS.highlights.set("read", new Highlight(...marked));
  const found = now.find ? blocks.flatMap((block) => rangesIn(block, now.find)) : [];
  CSS.highlights.set("found", new Highlight(...found));
}

function rangesIn(block, searched) {
  const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
  const nodes = [];
  let all = "";
  while (walker.nextNode()) {
    nodes.push([walker.currentNode, all.length]);
    all += walker.currentNode.data.toLowerCase();
  }
  const at = (place) => { const [node, start] = nodes.findLast(([, first]) => first <= place); return [node, Math.min(place - start, node.length)]; };
  const ranges = [];
  const words = searched.toLowerCase();
  for (let from = all.indexOf(words); from >= 0; from = all.indexOf(words, from + 1)) {
    const range = new Range();
    range.setStart(...at(from));
    range.setEnd(...at(from + words.length));
    ranges.push(range);
  }
  return ranges;
}

// --- events

async function show() {
  const state = read(location.hash);
  now = state;
  const [problems, otherProblems] = await Promise.all([problemsOf(state.view), state.otherView && problemsOf(state.otherView)]);
  if (now !== state) return; // somebody went on meanwhile
  const otherById = new Map((otherProblems ?? []).map((problem) => [problem.id, problem]));
  Object.assign(now, { problems, otherProblems, otherById, shared: problems.some((p) => otherById.get(p.id)?.gold === p.gold) });
  now.start = commonStart(problems.map((problem) => problem.prompt));
  now.partners = new Map(problems.map((problem) => [problem, partnerOf(problem)]));
  now.counts = Object.fromEntries(Object.entries(FILTERS).map(([key, [, test]]) => [key, problems.filter((p) => test(p, now.partners.get(p))).length]));
  const words = now.find.toLowerCase();
  now.listed = problems.filter((problem) => FILTERS[now.only][1](problem, now.partners.get(problem)) && matches(problem, words));
  const asked = problems.find(({ id }) => id === now.problem) ?? problems.find(({ place }) => String(place + 1) === now.problem);
  if (now.problem !== undefined && !asked) now.missing.push(`Problem ${now.problem} isn't among these samples.`);
  const problem = asked ?? now.listed[0];
  now.shown = { problem, partner: problem && now.partners.get(problem) };
  showHead();
  showProblem();
  showList();
  document.body.dataset.screen = now.problem === undefined ? "list" : "problem"; // on a phone, which has room for one
  document.body.dataset.ready = location.hash || "#";
}

function move(step) {
  const place = now.listed.indexOf(now.shown.problem);
  const to = now.listed[place < 0 ? 0 : place + step];
  if (to) go({ problem: to.id });
}

function moveView(step) {
  const to = now.source.views[now.source.views.indexOf(now.view) + step];
  if (to) go({ view: to, problem: undefined, ...besideOf(now.source, to) });
}

// Another step of the same kind keeps the comparison; one of the other kind has its own.
function besideOf(source, view) {
  if (now.other && view.trained === now.view.trained) return { otherView: viewOf(now.other, view.step) };
  const other = view.trained ? undefined : sourceOf(source.before);
  return { other, otherView: other && viewOf(other, view.step) };
}

function cycle(keys, key) {
  return keys[(keys.indexOf(key) + 1) % keys.length];
}

const KEYS = {
  j: () => move(1),
  ArrowRight: () => move(1),
  k: () => move(-1),
  ArrowLeft: () => move(-1),
  "]": () => moveView(1),
  "[": () => moveView(-1),
  f: () => go({ only: cycle(usefulFilters(), now.only), problem: undefined }),
  s: () => go({ shade: cycle(SHADES, now.shade) }),
  "/": () => byId("find").focus(),
  "?": () => byId("help").showModal(),
};

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const field = event.target.closest?.("input, select");
  if (field && event.key === "Escape") field.blur();
  else if (!field && Object.hasOwn(KEYS, event.key)) {
    event.preventDefault();
    KEYS[event.key]();
  }
});

byId("source").addEventListener("change", (event) => {
  const source = sourceOf(event.target.value);
  const view = viewOf(source, now.view.step);
  go({ source, view, ...besideOf(source, view) });
});
byId("step").addEventListener("change", (event) => {
  const view = viewOf(now.source, event.target.value);
  go({ view, problem: undefined, ...besideOf(now.source, view) });
});
byId("other").addEventListener("change", (event) => {
  const other = sourceOf(event.target.value);
  go({ other, otherView: other && viewOf(other, now.view.step) });
});
byId("other-step").addEventListener("change", (event) => go({ otherView: viewOf(now.other, event.target.value) }));
byId("shade").addEventListener("change", (event) => go({ shade: event.target.value }));
byId("find").addEventListener("input", (event) => {
  history.replaceState(null, "", address({ find: event.target.value, problem: undefined }));
  show();
});
byId("help-button").addEventListener("click", () => byId("help").showModal());
addEventListener("hashchange", show);

unpack("index").then((made) => {
  index = made;
  return show();
});
