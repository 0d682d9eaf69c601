"""What a training run was and what came of it: `report.json` is the dump of a `RunReport`, and
`report.html` what `render` makes of it, one page that needs nothing else.

Pure: the data comes in, text goes out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Literal

from pydantic import JsonValue

from aworld_runtime.messages import Data, Message, ToolCall
from aworld_runtime.training.charts import (
    CHART_STYLE,
    COLORS,
    lines_svg,
    phase_bars_svg,
    reward_curve_svg,
)
from aworld_runtime.training.progress import PHASES, minutes
from aworld_runtime.trajectory import Episode

When = Literal["before", "after"]

SHOWN_CHARACTERS = 2_000
"""Of one message in an example."""


class StepRow(Data):
    """One optimizer step."""

    step: int
    metrics: dict[str, float]
    """As in its `step.finished`: `reward/mean`, `actor/loss`, `perf/train_s`, ..."""

    @property
    def seconds(self) -> dict[str, float]:
        """By phase."""
        return {phase: self.metrics.get(f"perf/{phase}_s", 0.0) for phase in PHASES}


class HeldOut(Data):
    """Mean reward on held-out tasks with the weights after `step`."""

    step: int
    reward: float
    episodes: int
    seconds: float = 0.0


class Example(Data):
    """One agent's side of an episode, for people to read."""

    when: When
    step: int
    """The weights it was sampled with are those after this step."""
    task_id: str
    role: str
    preamble: tuple[Message, ...]
    """Instructions and worked examples before the task."""
    messages: tuple[Message, ...]
    reward: float | None
    breakdown: dict[str, float]
    episode_id: str
    reason: str | None = None


class Totals(Data):
    """Counted over the whole run, held-out episodes included."""

    episodes: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    tool_calls: int = 0
    takeovers: int = 0
    """Episodes that another worker finished, because the first one was gone."""
    retries: int = 0
    """Episodes that were begun again after a failure."""


class RunReport(Data):
    """A whole run."""

    run_id: str
    task: str
    status: str
    """`done`, or why it stopped."""
    model: str
    sampler: str
    workers: int
    seconds: float
    config: dict[str, JsonValue]
    steps: tuple[StepRow, ...]
    held_out: tuple[HeldOut, ...]
    examples: tuple[Example, ...]
    totals: Totals
    provenance: dict[str, JsonValue]

    @property
    def reward_curve(self) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
        """Train and held-out points, as `reward_curve_svg` takes them."""
        rewards = [(row.step, row.metrics.get("reward/mean")) for row in self.steps]
        train = [(float(step), reward) for step, reward in rewards if reward is not None]
        return train, [(float(point.step), point.reward) for point in self.held_out]


def choose_examples(
    before: Sequence[Episode],
    after: Sequence[Episode],
    *,
    role: str,
    steps: tuple[int, int],
    count: int = 3,
) -> tuple[Example, ...]:
    """The same held-out tasks before and after: the first ones, and the worst one after training.

    The worst is among them so that nobody sees only what went well.
    """
    earlier = {episode.task.id: episode for episode in before}
    both = [episode for episode in after if episode.task.id in earlier]
    worst = min(both, key=lambda episode: episode.reward or 0.0, default=None)
    chosen = [episode for episode in both if episode is not worst][: count - 1]
    if worst is not None:
        chosen.append(worst)
    pairs = [(earlier[episode.task.id], episode) for episode in chosen]
    return tuple(
        example
        for pair in pairs
        for episode, when, step in zip(pair, ("before", "after"), steps, strict=True)
        if (example := _example(episode, when, step, role)) is not None
    )


def _example(episode: Episode, when: str, step: int, role: str) -> Example | None:
    trajectory = episode.trajectory(role)
    if trajectory is None:
        return None
    opening = trajectory.turns[0].new_messages
    users = [number for number, message in enumerate(opening) if message.role == "user"]
    cut = users[-1] if users else len(opening)
    return Example.model_validate(
        {
            "when": when,
            "step": step,
            "task_id": episode.task.id,
            "role": role,
            "preamble": trajectory.messages[:cut],
            "messages": trajectory.messages[cut:],
            "reward": episode.reward if trajectory.reward is None else trajectory.reward,
            "breakdown": trajectory.breakdown,
            "episode_id": episode.id,
            "reason": episode.reason,
        }
    )


# --- the page --------------------------------------------------------------------------------------


def render(run: RunReport) -> str:
    """The whole report as one HTML page: no script, no link to anywhere."""
    sections = [
        _section("Reward", reward_curve_svg(*run.reward_curve), _parts_chart(run)),
        _section("Where the time went", _phase_chart(run), _phase_totals(run)),
        _section("Before and after, on tasks it was not trained on", _examples(run)),
        _section("Steps", _steps_table(run)),
        _section("What was run", _facts(_what_was_run(run)), _config(run)),
        _section("Where it came from", _facts(_scalars(run.provenance)), _provenance(run)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(run.task)}: training run {escape(run.run_id)}</title>"
        f"<style>{COLORS}{CHART_STYLE}{PAGE_STYLE}</style></head><body><main>"
        f"{_header(run)}{''.join(sections)}</main></body></html>\n"
    )


def _header(run: RunReport) -> str:
    cards = [
        ("held-out reward", _before_after(run)),
        ("optimizer steps", f"{len(run.steps)}"),
        ("time", minutes(run.seconds)),
        ("episodes", f"{run.totals.episodes:,}"),
        ("tokens sampled", f"{run.totals.sampled_tokens:,}"),
        ("tool calls", f"{run.totals.tool_calls:,}"),
        ("takeovers", f"{run.totals.takeovers:,}"),
        ("retries", f"{run.totals.retries:,}"),
    ]
    shown = "".join(f"<div><b>{value}</b><span>{name}</span></div>" for name, value in cards)
    status = "" if run.status == "done" else f'<p class="stopped">{escape(run.status)}</p>'
    return (
        f"<header><h1>{escape(run.task)}</h1>"
        f'<p class="faint">training run {escape(run.run_id)}</p>{status}'
        f'<div class="cards">{shown}</div></header>'
    )


def _before_after(run: RunReport) -> str:
    if not run.held_out:
        return "–"
    first, last = run.held_out[0], run.held_out[-1]
    return f"{first.reward:.2f} → {last.reward:.2f}"


def _section(title: str, *content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(content)}</section>"


def _parts_chart(run: RunReport) -> str:
    """The named parts of the reward, where the environment gives any."""
    names = sorted(
        {name for row in run.steps for name in row.metrics if name.startswith("reward/")}
        - {"reward/mean", "reward/max", "reward/std"}
    )
    if not names:
        return ""
    series = {
        name.removeprefix("reward/"): [
            (float(row.step), row.metrics[name]) for row in run.steps if name in row.metrics
        ]
        for name in names
    }
    return f"<h3>Its parts</h3>{lines_svg(series, 'Parts of the reward by step')}"


def _phase_chart(run: RunReport) -> str:
    return phase_bars_svg([(row.step, row.seconds) for row in run.steps], "Seconds per step")


def _phase_totals(run: RunReport) -> str:
    totals = {phase: sum(row.seconds[phase] for row in run.steps) for phase in PHASES}
    totals["evaluate"] = sum(point.seconds for point in run.held_out)
    whole = max(run.seconds, sum(totals.values()), 1e-9)
    totals["start and end"] = max(0.0, run.seconds - sum(totals.values()))
    rows = [
        (phase, f"{seconds:.1f}", f"{100 * seconds / whole:.0f} %")
        for phase, seconds in totals.items()
    ]
    return _table(("phase", "seconds", "share"), rows)


STEP_COLUMNS = {
    "reward/mean": ("reward", ".3f"),
    "reward/max": ("max", ".2f"),
    "actor/loss": ("loss", ".4f"),
    "actor/kl": ("kl", ".4f"),
    "actor/entropy": ("entropy", ".3f"),
    "actor/grad_norm": ("grad norm", ".2f"),
    "actor/logprob_gap": ("logprob gap", ".4f"),
    "rollout/num_turns": ("turns", ".2f"),
    "rollout/response_length": ("tokens", ".1f"),
    "perf/step_s": ("seconds", ".1f"),
}
"""Metric → its column's head and format."""


def _steps_table(run: RunReport) -> str:
    held_out = {point.step: f"{point.reward:.3f}" for point in run.held_out}
    names = [name for name in STEP_COLUMNS if any(name in row.metrics for row in run.steps)]
    head = ("step", "held-out", *(STEP_COLUMNS[name][0] for name in names))
    rows: list[tuple[str, ...]] = []
    if 0 in held_out:
        rows.append(("0", held_out[0], *([""] * len(names))))
    for row in run.steps:
        values = [
            format(row.metrics[name], STEP_COLUMNS[name][1]) if name in row.metrics else ""
            for name in names
        ]
        rows.append((str(row.step), held_out.get(row.step, ""), *values))
    return _table(head, rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _examples(run: RunReport) -> str:
    tasks = dict.fromkeys(example.task_id for example in run.examples)
    pairs = [
        "".join(_conversation(example) for example in run.examples if example.task_id == task)
        for task in tasks
    ]
    if not pairs:
        return '<p class="faint">No held-out episode was kept.</p>'
    return "".join(f'<div class="pair">{pair}</div>' for pair in pairs)


def _conversation(example: Example) -> str:
    when = "before training" if example.when == "before" else f"after step {example.step}"
    reward = "not scored" if example.reward is None else f"reward {example.reward:.2f}"
    parts = "".join(
        f'<span class="{"earned" if value else "missed"}">{escape(name)} {value:g}</span>'
        for name, value in example.breakdown.items()
    )
    preamble = ""
    if example.preamble:
        shown = "".join(_bubble(message) for message in example.preamble)
        preamble = f"<details><summary>instructions and examples</summary>{shown}</details>"
    return (
        f'<article><h3>{when}<em>{reward}</em></h3><p class="parts">{parts}</p>{preamble}'
        f"{''.join(_bubble(message) for message in example.messages)}"
        f'<p class="faint small">{escape(example.episode_id)}'
        f"{f' · {escape(example.reason)}' if example.reason else ''}</p></article>"
    )


def _bubble(message: Message) -> str:
    who = message.role if message.role != "tool" else f"{message.name or 'tool'} says"
    text = escape(_short(message.content))
    calls = "".join(f"<code>{escape(_short(_call(call)))}</code>" for call in message.tool_calls)
    if not text and not calls:
        text = '<span class="faint">(nothing)</span>'
    return f'<div class="bubble {message.role}"><span>{escape(who)}</span>{text}{calls}</div>'


def _call(call: ToolCall) -> str:
    if call.malformed is not None:
        return f"malformed call: {call.malformed}"
    arguments = ", ".join(
        f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items()
    )
    return f"{call.name}({arguments})"


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} […]"


def _what_was_run(run: RunReport) -> dict[str, str]:
    return {
        "task": run.task,
        "model": run.model,
        "sampler": run.sampler,
        "workers": str(run.workers),
        "tokens": f"{run.totals.prompt_tokens:,} in prompts, {run.totals.sampled_tokens:,} sampled",
        "result": run.status,
    }


def _scalars(values: Mapping[str, JsonValue]) -> dict[str, str]:
    """What fits into a line; the rest is folded away."""
    return {
        name: str(value)
        for name, value in values.items()
        if isinstance(value, str | int | float) and 0 < len(str(value)) <= 120
    }


def _facts(facts: Mapping[str, str]) -> str:
    rows = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    return f"<dl>{rows}</dl>"


def _config(run: RunReport) -> str:
    return _folded("configuration", run.config)


def _provenance(run: RunReport) -> str:
    shown = _scalars(run.provenance)
    rest = {name: value for name, value in run.provenance.items() if name not in shown and value}
    return "".join(_folded(name, value) for name, value in rest.items())


def _folded(name: str, value: JsonValue) -> str:
    text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
    return f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>"


PAGE_STYLE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5;
  font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { margin: 0; font-size: 28px; } h2 { margin: 44px 0 12px; font-size: 20px; }
h3 { margin: 18px 0 6px; font-size: 15px; }
.faint { color: var(--faint); margin: 0; } .small { font-size: 12px; }
.stopped { color: var(--c4); font-weight: 600; margin: 6px 0 0; }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: 1px;
  margin-top: 20px; border: 1px solid var(--grid); border-radius: 8px; overflow: hidden;
  background: var(--grid); }
.cards div { background: var(--paper); padding: 12px 14px; }
.cards b { display: block; font-size: 19px; white-space: nowrap; }
.cards span { color: var(--faint); font-size: 12px; }
@media (max-width: 640px) { .cards { grid-template-columns: repeat(2, 1fr); } }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { text-align: right; padding: 4px 12px; border-bottom: 1px solid var(--grid);
  white-space: nowrap; }
th { color: var(--faint); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr));
  gap: 16px; margin-bottom: 20px; align-items: start; }
article { border: 1px solid var(--grid); border-radius: 8px; padding: 4px 14px 12px; min-width: 0; }
article h3 { display: flex; justify-content: space-between; margin: 8px 0 4px; }
article h3 em { font-style: normal; font-weight: 500; color: var(--faint); }
.parts { display: flex; flex-wrap: wrap; gap: 6px; margin: 0 0 10px; font-size: 12px; }
.parts span { padding: 1px 8px; border-radius: 9px; border: 1px solid currentColor; }
.earned { color: var(--c2); } .missed { color: var(--faint); }
.bubble { margin: 8px 0; padding: 6px 10px; border-left: 3px solid var(--grid);
  white-space: pre-wrap; overflow-wrap: anywhere; }
.bubble > span:first-child { display: block; color: var(--faint); font-size: 12px; }
.bubble.user { border-color: var(--c5); } .bubble.assistant { border-color: var(--c0); }
.bubble.tool { border-color: var(--c1); }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
code { display: block; } pre { overflow-x: auto; max-height: 420px; padding: 12px;
  border: 1px solid var(--grid); border-radius: 8px; }
details { margin: 8px 0; } summary { cursor: pointer; color: var(--faint); font-size: 13px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 0; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
"""
