"""The picture of a plan: speed-up over draft length, and what becomes of it as the batch grows."""

from __future__ import annotations

from pathlib import Path

from pilotfish.errors import PilotfishError
from pilotfish.plan.report import Report


def draw(report: Report, file: Path) -> None:
    """Three plots in a PNG file, a colour for each drafter and acceptance rate.

    Raises PilotfishError when the file can not be written.
    """
    from matplotlib.figure import Figure

    estimates = report.estimates
    many_rates = len({found.acceptance for found in estimates}) > 1
    figure = Figure(figsize=(15, 5.2), layout="constrained")
    target, machine = report.sizes.target, report.machine
    figure.suptitle(
        f"{target.name}, {target.format.upper()}, on {machine.name} ({machine.gb_per_s:,.4g} GB/s, "
        f"{machine.tflop_per_s:,.4g} TFLOP/s), context {report.sizes.context:,}"
    )
    lengths, best, gain = figure.subplots(1, 3)
    lengths.axhline(1, color="grey", linewidth=1)
    gain.axhline(1, color="grey", linewidth=1)
    for index, found in enumerate(estimates):
        colour = f"C{index % 10}"
        name = found.drafter + (f", a = {found.acceptance:g}" if many_rates else "")
        ks = [row.drafts for row in found.lengths]
        lengths.plot(ks, [row.speed_up for row in found.lengths], color=colour, label=name)
        lengths.plot(ks, [row.flat for row in found.lengths], "--", color=colour, linewidth=1)
        if found.best.drafts:
            lengths.plot(found.best.drafts, found.best.speed_up, "o", color=colour)
        sizes = [point.batch for point in found.batches]
        best.plot(sizes, [point.drafts for point in found.batches], ".-", color=colour)
        gain.plot(sizes, [point.speed_up for point in found.batches], ".-", color=colour)
        if found.pays_until and sizes[0] <= found.pays_until < sizes[-1]:
            gain.axvline(found.pays_until + 1, color=colour, linestyle="-.", linewidth=1)
    thumbs = {found.acceptance: found.lengths for found in estimates}
    for rate, rows in thumbs.items():
        heights = [row.rule_of_thumb for row in rows]
        lengths.plot([row.drafts for row in rows], heights, "k:", linewidth=1)
        if many_rates:
            place = rows[-1].drafts, heights[-1]
            lengths.annotate(f"{rate:g}", place, textcoords="offset points", xytext=(3, 0), va="center", fontsize=8)
    rates = ", ".join(f"{rate:g}" for rate in thumbs)
    for axes, style, name in (
        (lengths, "--", "a pass of k + 1 rows taken to cost as much as one of 1 (flat)"),
        (lengths, ":", "rule of thumb" + (" (at its end: a)" if many_rates else "")),
        (gain, "-.", "best k is 0 from here"),
    ):
        axes.plot([], [], style, color="black", linewidth=1, label=name)
    lengths.set(
        xlabel="draft tokens k",
        ylabel="speed-up over plain decoding",
        title=f"batch {report.batch}, acceptance {rates}",
    )
    best.set(xlabel="batch size (requests)", ylabel="best k (0 = plain decoding)", title="best draft length")
    gain.set(xlabel="batch size (requests)", ylabel="speed-up over plain decoding", title="speed-up at the best length")
    for axes in (best, gain):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    for axes in (lengths, best, gain):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    drawn = [axes.get_legend_handles_labels() for axes in (lengths, gain)]
    entries = {label: handle for handles, labels in drawn for handle, label in zip(handles, labels, strict=True)}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=min(4, len(entries)), fontsize=8)
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise PilotfishError(f"can not write {file}: {error.strerror}") from None
