"""The table of the offline measurement: acceptance by workload, position and condition, and whether text changed."""

from collections.abc import Sequence

from drafthead.config.evaluation import ALL
from drafthead.evaluation.reporting.tables import Table, number, percent_text, percents, table
from drafthead.evaluation.results.summary import AcceptanceSummary, MethodAcceptance
from drafthead.evaluation.workload import BASELINE_AGAIN, NAMES


def acceptance_table(summary: AcceptanceSummary) -> Table:
    """The main condition: every method on every workload, all prompts first."""
    note = (
        f"{summary.prompts - summary.looping} of {summary.prompts} held-out prompts; {summary.looping} left out "
        f"because the baseline's own response loops (over 10 % of its 8-grams repeat), where acceptance means little. "
        f"{summary.ended:.0%} of the baseline's responses end by themselves. "
    )
    if again := summary.identical.get(BASELINE_AGAIN):
        note += (
            f"The baseline answers {percent_text(again)} % identically a second time: the noise floor of `identical`. "
        )
    return conditions_table(sorted(summary.methods, key=lambda m: (m.category != ALL, m.category)), note)


def conditions_table(entries: Sequence[MethodAcceptance], note: str = "") -> Table:
    """Acceptance by workload, method, K, temperature and effort."""
    rows = [
        {
            "Workload": e.category,
            "Method": NAMES[e.method],
            "K": str(e.K),
            "T": f"{e.temperature:g}",
            "Effort": e.effort,
            "Prompts": e.prompts,
            "Acceptance length": e.length,
            "Rate (%)": number(100 * e.rate, 1),
            "Tokens per step": e.tokens_per_step,
            "By position (%)": percents(e.positions.unconditional),
            "Given the one before (%)": percents(e.positions.conditional),
            "Accepted 0…K (%)": percents(e.histogram),
            "Identical (%)": percent_text(e.identical) if e.identical else None,
        }
        for e in entries
    ]
    note += (
        "Acceptance length is 1 + accepted / drafts, in tokens, and grows with K by construction: compare at equal K. "
        "Tokens per step counts steps without a draft too. Given the one before: among drafts that proposed a token "
        "there. Identical: greedy responses equal to the baseline's of the setting. Brackets: 95 % bootstrap over "
        "prompts."
    )
    return table("Acceptance length", rows, note)
