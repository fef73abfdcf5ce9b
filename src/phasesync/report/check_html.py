"""A check's report as one page that needs nothing else: step through the run, watch memory."""

from html import escape

from phasesync.checker.report import Report, word
from phasesync.core import wire
from phasesync.core.plan import Plan
from phasesync.core.verdict import Violated
from phasesync.report import lanes
from phasesync.report.check_text import report_lines

__all__ = ("html",)

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em }}
pre {{ background: #f6f6f4; padding: 1em; overflow: auto }}
table {{ border-collapse: collapse }} td, th {{ padding: .2em .7em; text-align: left }}
tr.now {{ background: #fde9a9 }} tr.bad td {{ color: #a40000; font-weight: 600 }}
.bar {{ display: inline-block; height: 1em; min-width: .4em; margin-right: 2px }}
#steps {{ max-height: 30em; overflow: auto; border: 1px solid #ddd }}
</style></head><body><h1>{title}</h1><pre>{summary}</pre>
<div id="run"></div>
<script>
const run = {data};
const box = document.getElementById("run");
// Names come from protocol files and hosts: whatever is written into the page goes through here.
const esc = text => String(text).replace(/[&<>"'`]/g, c => `&#${{c.charCodeAt(0)}};`);
if (run) {{
  box.innerHTML = `<p><button id="back">back</button> <button id="on">on</button>
    step <span id="at"></span></p><div id="memory"></div><div id="steps"><table></table></div>`;
  const table = box.querySelector("table");
  const heads = run.ranks.map(r => `<th>${{esc(r)}}</th>`).join("");
  table.innerHTML = `<tr><th>step</th>${{heads}}</tr>` +
    run.steps.map((s, n) => `<tr data-n="${{n + 1}}"` + (s.bad ? ' class="bad"' : "") +
      `><td>${{n + 1}}</td>` + run.ranks.map((_, r) =>
        `<td>${{r === s.rank ? esc(s.text) : ""}}</td>`).join("") + "</tr>").join("");
  let at = Math.min(run.steps.length, parseInt(location.hash.slice(1)) || run.steps.length);
  const colours = {{mapped: "#4c78a8", unknown: "#f58518", lost: "#a40000"}};
  function show() {{
    location.hash = at;
    document.getElementById("at").textContent = `${{at}} of ${{run.steps.length}}`;
    table.querySelectorAll("tr").forEach(tr => tr.classList.toggle("now", tr.dataset.n == at));
    document.getElementById("memory").innerHTML = "<table>" + run.devices.map((d, i) =>
      `<tr><th>${{esc(d)}}</th><td>` + run.memory[at][i].map(([name, state]) =>
        `<span class="bar" style="background:${{colours[state]}}"></span>` +
        `${{esc(name)}} `).join("") +
      "</td></tr>").join("") + "</table>";
  }}
  document.getElementById("back").onclick = () => {{ at = Math.max(0, at - 1); show(); }};
  document.getElementById("on").onclick = () => {{
    at = Math.min(run.steps.length, at + 1); show();
  }};
  table.onclick = e => {{
    const tr = e.target.closest("tr");
    if (tr?.dataset.n) {{ at = +tr.dataset.n; show(); }}
  }};
  show();
}}
</script></body></html>
"""


def html(report: Report) -> str:
    """One page that needs nothing else: the report, and its run to step through."""
    case = report.counterexample
    data = "null"
    if case is not None and case.plan is not None and isinstance(case.verdict, Violated):
        text = wire.encode(_run(case.plan, case.verdict)).decode()
        data = text.replace("<", "\\u003c")
    return _PAGE.format(
        title=escape(f"{report.protocol}: {word(report.verdict)}"),
        summary=escape("\n".join(report_lines(report))),
        data=data,
    )


def _run(plan: Plan, broken: Violated) -> dict[str, object]:
    rows, systems = lanes.rows(plan, broken.path)
    last = len(rows) if broken.violations else 0
    return {
        "ranks": [str(rank) for rank in plan.members],
        "devices": list(plan.devices),
        "steps": [{"rank": row.rank, "text": row.text, "bad": row.number == last} for row in rows],
        "memory": [lanes.memory(plan, system) for system in systems],
    }
